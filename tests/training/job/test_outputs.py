"""Paths that a job can't write are refused before it starts, and the check leaves no files."""

import os
from pathlib import Path

import pytest

from tests.support.refusals import refusal
from titanplans.config import ConfigError
from titanplans.config.schema import build_job, keys
from titanplans.config.values import FilePath
from titanplans.training.job.outputs import check_outputs, outputs
from titanplans.training.trainer.jsonl import JsonlWriter, read_metrics

SWITCHES = {
    "checkpoint.enable": True,
    "metrics.enable_tensorboard": True,
    "metrics.enable_jsonl": True,
    "profiling.enable_profiling": True,
    "profiling.enable_memory_snapshot": True,
    "comm.trace_buf_size": 20_000,
}
INPUTS = {
    "model.config",
    "model.hf_assets_path",
    "training.dataset_path",
    "validation.dataset_path",
    "checkpoint.initial_load_path",
    "checkpoint.initial_adapter_path",
    "training.chat.chat_template",
}
"""Options of paths that a job reads."""
WRITTEN = sorted(
    name for name, key in keys().items() if key.hint in (FilePath, FilePath | None) and name not in INPUTS
)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    os.symlink("loop", "loop")
    os.symlink("/nonexistent/folder", "nowhere")
    return tmp_path


def there(folder):
    return sorted(path.relative_to(folder) for path in folder.rglob("*"))


def test_every_option_of_a_written_path_is_tested_here():
    job = build_job(SWITCHES | {"job.save_config_file": "config.json"})
    assert {key for key, _, _ in outputs(job)} == set(WRITTEN)
    assert len(WRITTEN) == 7


@pytest.mark.parametrize("key", WRITTEN)
@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("file/x", "file is a file or a broken link, not a folder"),
        ("x" * 300, "File name too long"),
        ("y/" * 2500, "File name too long"),
        ("loop/x", "loop is a file or a broken link"),
        ("nowhere/x", "nowhere"),
        ("/proc/x", "can't be created (No such file or directory)"),
        ("/dev/null/x", "/dev/null is a file"),
    ],
)
def test_a_path_that_can_not_be_written_is_refused(folder, key, path, reason):
    before = there(folder)
    # Every other path is relative to dump_folder.
    value = path if key == "job.dump_folder" or path.startswith("/") else str(folder / path)
    message = refusal(lambda: check_outputs(build_job(SWITCHES | {key: value})), kind=ConfigError)
    assert message.startswith(f'{key} = "{value}": ')
    assert reason in message
    assert there(folder) == before


@pytest.mark.parametrize(
    "name",
    ["parallelism.json", "metrics.jsonl", "config.json", "titanplans.lock", "checkpoint/titanplans.lock"],
)
def test_a_folder_in_place_of_a_file_is_refused(name):
    (Path("outputs") / name).mkdir(parents=True)
    with pytest.raises(ConfigError, match=f"outputs/{name} is not a regular file"):
        check_outputs(build_job(SWITCHES | {"job.save_config_file": "config.json"}))


def test_a_bad_line_of_metrics_is_named_and_an_incomplete_last_one_ignored(tmp_path):
    file = tmp_path / "metrics.jsonl"
    lines = b'{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 2.0}\n'
    for torn in (b"", b'{"step": 3, "lo', b"\0" * 40):
        file.write_bytes(lines + torn)
        assert [row["step"] for row in read_metrics(file)] == [1, 2]
    writer = JsonlWriter(file)
    writer.log({"loss": 1.0}, 3)
    writer.close()
    assert [row["step"] for row in read_metrics(file)] == [1, 2, 3]
    file.write_bytes(lines + b'{"step": 3, "lo\n{"step": 4}\n')
    with pytest.raises(ConfigError, match=r"metrics\.jsonl, line 3 holds no metrics"):
        read_metrics(file)


@pytest.mark.parametrize("content", [b"no JSON\n", b"[]\n", b"{}\n", b"\xff\n"])
def test_another_file_in_place_of_the_metrics_is_refused(content):
    Path("outputs").mkdir()
    Path("outputs/metrics.jsonl").write_bytes(content)
    with pytest.raises(ConfigError, match=r"outputs/metrics\.jsonl, line 1 holds no metrics"):
        check_outputs(build_job(SWITCHES))


def test_the_metrics_of_every_rank_are_checked():
    Path("outputs/rank_1").mkdir(parents=True)
    Path("outputs/rank_1/metrics.jsonl").write_text("[]\n")
    with pytest.raises(ConfigError, match=r"rank_1/metrics\.jsonl, line 1 holds no metrics"):
        check_outputs(build_job(SWITCHES))


@pytest.mark.parametrize("path", [".", "new/deep", "new/../other", "a b", "é" * 100, "link/inside"])
def test_a_path_that_can_be_written_is_accepted(folder, path):
    os.symlink(folder, "link")
    before = there(folder)
    for key in WRITTEN:
        check_outputs(build_job(SWITCHES | {key: path if key != "job.save_config_file" else f"{path}/file"}))
    assert there(folder) == before


def test_paths_that_are_not_written_are_not_checked():
    unwritten = dict.fromkeys(sorted({*WRITTEN} - {"job.dump_folder", "comm.save_traces_folder"}), "/proc/x")
    del unwritten["job.save_config_file"]
    check_outputs(build_job(unwritten | {"comm.trace_buf_size": 0, "comm.save_traces_folder": "/proc/x"}))
