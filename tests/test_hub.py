"""Folders are pushed to a hub on this machine and downloaded from it; the cache without a network; errors of the hub."""

import json
import logging

import pytest

from tests.support.hub_server import TOKEN, hub_server, use_hub
from titanplans.errors import ConfigError, RunError
from titanplans.hub import Repository, check_access, local_folder, push, repository_of

NOWHERE = "http://127.0.0.1:9"
"""An address at which nothing listens."""


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with hub_server() as hub:
        use_hub(monkeypatch.setattr, hub.address, tmp_path / "cache")
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

    monkeypatch.setattr(constants, "ENDPOINT", NOWHERE)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with pytest.raises(ConfigError, match="can't be reached"):
        check_access("ada/model")


# ---------------------------------------------------------------- downloads

WEIGHTS = {"model-1.safetensors": b"first", "model-2.safetensors": b"second"}
SMALL = {"config.json": b"{}", "tokenizer.json": b"tokens", "chat_template.jinja": b"template"}
OTHERS = {"model.bin": b"pickle", "consolidated.safetensors": b"once more", "README.md": b"# card"}


@pytest.fixture
def published(tmp_path):
    """Return a folder with the files of a model and others, whose weights are in two files."""
    folder = tmp_path / "published"
    folder.mkdir()
    index = json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}).encode()
    for name, content in (SMALL | WEIGHTS | OTHERS | {"model.safetensors.index.json": index}).items():
        (folder / name).write_bytes(content)
    return folder


@pytest.mark.parametrize(
    ("path", "repository"),
    [
        ("ada/model", Repository("ada/model")),
        ("ada/model@v1", Repository("ada/model", "v1")),
        ("ada/model@refs/pr/1", Repository("ada/model", "refs/pr/1")),
        *(
            (path, None)
            for path in ("model", "/model", "./model", "../model", "a/b/c", "ada/mo del", "ada/model@")
        ),
        *((path, None) for path in ("here/model", "here/model@v1", "ada/config.json")),
    ],
)
def test_a_repository_is_named_by_what_is_no_local_path(path, repository, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here" / "model").mkdir(parents=True)
    (tmp_path / "here" / "model@v1").mkdir()
    assert repository_of(path) == repository


def test_only_the_needed_files_are_downloaded_and_only_once(hub, published, tmp_path):
    commit = hub.publish("ada/model", published)
    folder = local_folder("ada/model", "it")
    assert folder == str(tmp_path / "cache" / "models--ada--model" / "snapshots" / commit)
    assert sorted(hub.downloads) == sorted(SMALL)
    assert local_folder("ada/model", "it") == local_folder(f"ada/model@{commit}", "it") == folder
    assert local_folder("ada/model@main", "it", weights=True) == folder
    assert sorted(hub.downloads) == sorted([*SMALL, *WEIGHTS, "model.safetensors.index.json"])
    assert local_folder("ada/model", "it", weights=True) == folder
    assert len(hub.downloads) == 6


def test_a_new_commit_and_an_old_one(hub, published, tmp_path):
    old = hub.publish("ada/model", published)
    (published / "tokenizer.json").write_bytes(b"more tokens")
    new = hub.publish("ada/model", published)
    hub.revisions["ada/model", "v1"] = old
    folders = [local_folder(name, "it") for name in ("ada/model", "ada/model@v1", f"ada/model@{old}")]
    assert [folder.rpartition("/")[2] for folder in folders] == [new, old, old]


@pytest.mark.parametrize("offline", [True, False], ids=["HF_HUB_OFFLINE", "no network"])
def test_without_a_network_the_cache_is_used(hub, published, monkeypatch, caplog, offline, tmp_path):
    from huggingface_hub import constants

    commit = hub.publish("ada/model", published)
    folder = local_folder("ada/model", "it")
    use_hub(monkeypatch.setattr, NOWHERE, tmp_path / "cache")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    with caplog.at_level(logging.INFO):
        assert local_folder("ada/model", "it") == folder
    assert f"it: the Hub can't be reached ({'HF_HUB_OFFLINE is set' if offline else ''}" in caplog.text
    assert f"the files of {folder} are used" in caplog.text
    with pytest.raises(
        ConfigError, match=r"can't be reached .* model\.safetensors of this repository is not in the cache"
    ):
        local_folder(f"ada/model@{commit}", "it", weights=True)
    with pytest.raises(
        ConfigError, match=r"^it: .* config\.json of this repository is not in the cache .*; start the job"
    ):
        local_folder("ada/other", "it")


def test_an_interrupted_download_is_not_complete(hub, published, monkeypatch, tmp_path):
    hub.publish("ada/model", published)
    folder = local_folder("ada/model", "it", weights=True)
    (tmp_path / folder / "model-2.safetensors").unlink()
    use_hub(monkeypatch.setattr, NOWHERE, tmp_path / "cache")
    with pytest.raises(ConfigError, match=r"model-2\.safetensors of this repository is not in the cache"):
        local_folder("ada/model", "it", weights=True)


def test_errors_of_the_hub_are_one_line_each(hub, published, monkeypatch):
    with pytest.raises(
        ConfigError, match=r"^it: there is no such folder, and no such repository on the Hub; correct"
    ):
        local_folder("ada/none", "it")
    commit = hub.publish("ada/model", published)
    with pytest.raises(ConfigError, match="no revision 'v2'; write a branch, a tag or a commit after @"):
        local_folder("ada/model@v2", "it")
    with pytest.raises(
        ConfigError, match=rf"has no vocab.json at commit {commit}; name a repository that has it"
    ):
        local_folder("ada/model", "it", ("config.json", "vocab.json"))
    hub.gated.add("ada/model")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(
        ConfigError, match=rf"is gated; accept its conditions at {hub.address}/ada/model, and run hf auth"
    ):
        local_folder("ada/model", "it")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert local_folder("ada/model", "it").endswith(commit)
    (published / "model.safetensors.index.json").unlink()
    hub.publish("ada/pickles", published)
    with pytest.raises(ConfigError, match=r"has no model\.safetensors .* such as pickles, are not read"):
        local_folder("ada/pickles", "it", weights=True)
