"""Checkpoints on disk are complete or absent, wherever a process is killed; they are checked, and run no code when read."""

import json
import os
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from titanplans.cli.main import main
from titanplans.config.schema import build_job
from titanplans.errors import ConfigError
from titanplans.training.checkpoint import folder
from titanplans.training.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    _checksum,
    damage,
    describe_changes,
    read_manifest,
)
from titanplans.training.checkpoint.match import check_finished, job_values
from titanplans.training.checkpoint.storage import CheckpointReader, CheckpointWriter, Planner


def state(value: float) -> dict:
    return {"weight": torch.full((64, 8), value), "train_state": {"step": 3, "rng": torch.arange(5)}}


LR = {"optimizer.lr": 0.1}


def write(
    path: Path, step: int, value: float = 1.0, holds: str = "training", job: dict | None = None
) -> Path:
    """Write a checkpoint, and replace one at the same path."""
    checkpoint = folder.checkpoint_path(path, step)
    manifest = Manifest(step, holds, {"hidden_size": 8}, LR if job is None else job, {})  # type: ignore[arg-type]
    dcp.save(state(value), storage_writer=CheckpointWriter(checkpoint, manifest), no_dist=True)
    return checkpoint


def load(checkpoint: Path) -> dict:
    loaded = state(0.0)
    dcp.load(loaded, storage_reader=CheckpointReader(checkpoint), planner=Planner(), no_dist=True)
    return loaded


def test_a_checkpoint_is_written_and_read(tmp_path):
    checkpoint = write(tmp_path, 4, 2.5)
    assert torch.equal(load(checkpoint)["weight"], torch.full((64, 8), 2.5))
    manifest = read_manifest(checkpoint)
    assert (manifest.step, manifest.holds, manifest.model, manifest.job) == (
        4,
        "training",
        {"hidden_size": 8},
        LR,
    )
    files = {path.name for path in checkpoint.iterdir()} - {MANIFEST}
    assert manifest.files.keys() == files == {".metadata", "__0_0.distcp"}
    assert damage(checkpoint) is None
    assert [path.name for path in tmp_path.iterdir()] == ["step-4"]


def test_every_flipped_bit_is_detected(tmp_path, capsys):
    checkpoint, draw = write(tmp_path, 4), random.Random(0)
    for path in checkpoint.iterdir():
        content = path.read_bytes()
        for _ in range(20):
            flipped = bytearray(content)
            flipped[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
            path.write_bytes(flipped)
            assert main(["check", str(checkpoint)]) == 1
            assert path.name in capsys.readouterr().out
        path.write_bytes(content[:-1])
        assert main(["check", str(tmp_path)]) == 1
        path.unlink()
        assert main(["check", str(checkpoint)]) == (2 if path.name == MANIFEST else 1)
        path.write_bytes(content)
    assert main(["check", str(tmp_path)]) == 0


class Killed(BaseException):
    pass


@pytest.mark.parametrize("present", ["nothing", "the same step"])
def test_a_killed_save_leaves_a_complete_checkpoint_or_none(tmp_path, monkeypatch, present):
    calls = 0

    def counted(real: Callable, die_at: int) -> Callable:
        def call(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls == die_at:
                raise Killed
            return real(*args, **kwargs)

        return call

    for die_at in range(1, 40):
        path, calls = tmp_path / str(die_at), 0
        if present == "the same step":
            write(path, 4, 1.0)
        with monkeypatch.context() as patched:
            for module, name in ((os, "fsync"), (Path, "rename"), (shutil, "rmtree"), (Path, "unlink")):
                patched.setattr(module, name, counted(getattr(module, name), die_at))
            try:
                write(path, 4, 2.0)
            except BaseException:  # noqa: BLE001  torch wraps `Killed` in another error
                ended = False
            else:
                ended = True
        folder.tidy(path)
        steps = folder.steps(path)
        assert steps == ([4] if present != "nothing" or ended else steps)
        for step in steps:
            checkpoint = folder.checkpoint_path(path, step)
            assert damage(checkpoint) is None
            value = load(checkpoint)["weight"].unique().item()
            assert value == 2.0 if ended else value in (1.0, 2.0)
        assert [entry.name for entry in path.iterdir()] == [f"step-{step}" for step in steps]
        if ended:
            break
    assert ended
    assert die_at > 6  # the process was also killed in the middle of a save


def test_only_checkpoints_of_titanplans_are_listed(tmp_path):
    write(tmp_path, 4)
    others = "step-4-best keep-step-4 notes-step-1 step-100.bak step-08 .step-5.mine"
    for name in others.split():
        shutil.copytree(tmp_path / "step-4", tmp_path / name)
    (tmp_path / "step-9").mkdir()  # empty, so not a checkpoint
    before = sorted(path.name for path in tmp_path.iterdir())
    assert folder.steps(tmp_path) == [4]
    folder.tidy(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_leftovers_are_removed_also_if_files_or_links(tmp_path):
    """If a leftover is a link, the link is removed, but not its target."""
    target = tmp_path / "kept"
    target.mkdir()
    (target / "precious").touch()
    (tmp_path / ".step-6.writing").touch()
    (tmp_path / ".step-8.removed").symlink_to(target)
    (tmp_path / ".step-9.writing").symlink_to("nowhere")
    folder.tidy(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    assert (target / "precious").exists()


def test_foreign_folders_are_neither_listed_nor_replaced(tmp_path):
    (tmp_path / "step-4").mkdir()
    (tmp_path / "step-4" / "notes").write_text("mine")
    with pytest.raises(BaseException, match=r"step-4 has no titanplans\.json"):
        write(tmp_path, 4)
    with pytest.raises(ConfigError, match=r"step-4 has no titanplans\.json.*move it away.*initial_load_path"):
        folder.steps(tmp_path)
    assert (tmp_path / "step-4" / "notes").read_text() == "mine"


class Runs:
    """Creates a file when it is unpickled."""

    def __init__(self, file: Path):
        self.file = file

    def __reduce__(self):
        return Path.touch, (self.file,)


def test_no_code_of_a_checkpoint_runs(tmp_path):
    checkpoint, ran = write(tmp_path, 4), tmp_path / "ran"
    (checkpoint / ".metadata").write_bytes(pickle.dumps(Runs(ran)))
    with pytest.raises(ConfigError, match=r"damaged .*does not belong"):
        CheckpointReader(checkpoint).read_metadata()
    poisoned = tmp_path / "poisoned"
    dcp.save({"train_state": Runs(ran)}, checkpoint_id=poisoned, no_dist=True)
    reads = {"storage_reader": CheckpointReader(poisoned), "planner": Planner(), "no_dist": True}
    with pytest.raises(BaseException, match="train_state in the checkpoint is damaged"):
        dcp.load({"train_state": None}, **reads)  # type: ignore[arg-type]
    assert not ran.exists()


def test_a_manifest_of_a_later_format_is_refused(tmp_path):
    checkpoint = write(tmp_path, 4)
    values = json.loads((checkpoint / MANIFEST).read_text())
    (checkpoint / MANIFEST).write_text(json.dumps(values | {"format": 3}))
    with pytest.raises(ConfigError, match=r"has format 3, .*reads 2"):
        read_manifest(checkpoint)


def test_a_manifest_of_the_first_format_has_no_plan(tmp_path):
    checkpoint = write(tmp_path, 4)
    values = json.loads((checkpoint / MANIFEST).read_text())
    del values["plan"], values["checksum"]
    values["format"] = 1
    values["checksum"] = _checksum(values)
    (checkpoint / MANIFEST).write_text(json.dumps(values))
    assert (read_manifest(checkpoint).plan, read_manifest(checkpoint).step) == (None, 4)


def test_changes_are_named_up_to_five():
    assert describe_changes({"a": 1, "b": None}, {"a": 1}) == ""
    assert describe_changes({"a": 1}, {"a": "x"}) == 'a = 1, now "x"'
    assert describe_changes({}, dict.fromkeys("abcdefg", 0)).endswith("e = unset, now 0 and 2 more keys")


def test_a_finished_job_differs_by_keys_that_decide_its_result(tmp_path):
    job = build_job({"checkpoint.folder": str(tmp_path), "training.steps": 4, "optimizer.lr": 0.1})
    last = write(tmp_path, 4)
    check_finished(last, job)  # the manifest has only one key, as in an earlier release
    write(tmp_path, 4, holds="weights", job=job_values(job))
    deciding = {"lora.rank": 8, "optimizer.lr": 0.2, "training.seq_len": 64, "data.packing": "best_fit"}
    for key, value in (deciding | {"debug.seed": 1}).items():
        message = rf"other options \({key} = .*, now \"?{value}\"?\); name another"
        with pytest.raises(ConfigError, match=message):
            check_finished(last, build_job(LR | {key: value}))
    incidental = {"training.steps": 3, "metrics.log_freq": 1, "training.gc_freq": 9}
    for key, value in (incidental | {"parallelism.tensor_parallel_degree": 2}).items():
        check_finished(last, build_job(LR | {key: value}))
