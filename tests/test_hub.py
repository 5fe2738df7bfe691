"""Folders are pushed to a hub on this machine, to new and to existing repositories; errors of the hub."""

import pytest

from tests.support.hub_server import TOKEN, hub_server
from titanplans.errors import ConfigError, RunError
from titanplans.hub import check_access, push


@pytest.fixture
def hub(monkeypatch):
    from huggingface_hub import constants

    with hub_server() as hub:
        # huggingface_hub reads the environment only once, when it is imported.
        monkeypatch.setattr(constants, "ENDPOINT", hub.address)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield hub


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "README.md").write_text("# how it was trained")
    return folder


def test_a_new_repository_gets_all_files(hub, folder):
    check_access("ada/model")
    address = push(folder, "ada/model", private=True, message="step-2")
    assert hub.files["ada/model"] == {
        "model.safetensors": b"weights",
        "README.md": b"# how it was trained",
    }
    assert (hub.messages, hub.private) == (["step-2"], {"ada/model": True})
    assert address == f"{hub.address}/ada/model/commit/{1:040}"


def test_an_existing_repository_keeps_its_card_and_loses_old_weights(hub, folder):
    old = {"README.md": b"by hand", "model-00001-of-00002.safetensors": b"old", "notes.txt": b"kept"}
    hub.files["ada/model"] = dict(old)
    assert push(folder, "ada/model", private=False, message="step-4").endswith(" (its model card is kept)")
    assert hub.files["ada/model"] == {
        "README.md": b"by hand",
        "notes.txt": b"kept",
        "model.safetensors": b"weights",
    }


def test_a_refused_commit_names_the_command_that_repeats_it(hub, folder):
    hub.refuses_commits = True
    with pytest.raises(
        RunError, match=rf"not pushed to ada/model \(.*403.*\); hf upload ada/model {folder} pushes"
    ):
        push(folder, "ada/model", private=False, message="")


@pytest.mark.parametrize("name", ["model", "ada/model/more", "ada/mo del", "--model"])
def test_a_name_that_is_no_repository_is_refused_before_anything_is_sent(name):
    with pytest.raises(ConfigError, match=f"--push-to-hub {name}: "):
        check_access(name)


def test_a_missing_or_wrong_token_is_refused(hub, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(ConfigError, match="the Hub refuses the token, or can't be reached"):
        check_access("ada/model")
    monkeypatch.delenv("HF_TOKEN")
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    with pytest.raises(
        ConfigError, match="needs a token with write access: run hf auth login, or set HF_TOKEN"
    ):
        check_access("ada/model")


def test_a_hub_that_can_not_be_reached_is_named(monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # a port on which nothing listens
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with pytest.raises(ConfigError, match="can't be reached"):
        check_access("ada/model")
