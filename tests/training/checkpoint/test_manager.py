"""Checkpoints of jobs on several ranks: starts from older steps, non-finite values, full disks, and other degrees."""

import gc
import math
import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh

from tests.support import process_groups
from tests.support.job_comparison import SAVES, TP
from tests.support.refusals import refusal
from tests.support.step_comparison import full_copy
from tests.support.system import largest_file
from tests.support.trained_jobs import logged_messages, train, write_inputs
from titanplans.errors import ConfigError, Diverged, NotSaved
from titanplans.training.checkpoint.manifest import damage

pytestmark = pytest.mark.thorough


def dense(dump: str, *options: str) -> tuple:
    """Return the arguments for `train` of a job on two ranks that saves every second step."""
    return Path(os.environ["TEST_FOLDER"]), "dense", dump, TP, *SAVES, *options


def names(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.glob("*"))


def goes_back(rank: int, folder: Path) -> dict:
    """Start a job in a new folder from step 4 of another job, resume it, and resume it once more as a launcher does."""
    results = {"uninterrupted": train(*dense("straight", "--checkpoint.keep_latest_k=0"))[0].losses()}
    start = f"--checkpoint.initial_load_path={folder}/straight/checkpoint/step-4"
    again = dense("again", "--checkpoint.keep_latest_k=2", start, "--checkpoint.no-initial_load_model_only")
    results["again"] = train(*again)[0].losses()
    results["names"] = names(folder / "straight" / "checkpoint"), names(folder / "again" / "checkpoint")
    results["on"] = train(*again, "--training.steps=10", "--checkpoint.load_step=8")[0].losses()
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "1"
    results["restarted"] = train(*again, "--training.steps=12", "--checkpoint.load_step=8")[0].losses()
    del os.environ["TORCHELASTIC_RESTART_COUNT"]
    return results


def of_a_stranger(rank: int, folder: Path) -> dict:
    poisoned = folder / "poisoned"

    class Runs:
        def __reduce__(self):
            return Path.touch, (folder / "ran",)

    def poison(trainer) -> None:
        states = {**trainer.model_parts[0].lm.state_dict(), **trainer.checkpointer.states}
        dcp.save(states | {"train_state": trainer.state_dict() | {"step": Runs()}}, checkpoint_id=poisoned)

    train(*dense("poison", "--training.steps=1"), prepare=poison)
    options = (f"--checkpoint.initial_load_path={poisoned}", "--checkpoint.no-initial_load_model_only")
    return {"poisoned": refusal(train, *dense("new", *options), kind=ConfigError)}


def changed_options(rank: int, folder: Path) -> dict:
    job = dense("options", "--lr_scheduler.decay_ratio=0.0")
    train(*job, "--training.steps=4")
    changed = ("weight_decay=0.3", "beta1=0.5", "lr=1e-4", "name=Adam")
    with logged_messages() as lines:
        _, trainer = train(*job, *(f"--optimizer.{option}" for option in changed), "--training.steps=6")
    (optimizer,) = trainer.optimizers
    keys = ("weight_decay", "betas", "lr")
    return {
        "groups": [{key: group[key] for key in keys} for group in optimizer.param_groups],
        "lines": [line for line in lines if "was saved by a job with other values" in line],
        "name": type(optimizer).__name__,
        "step": next(iter(optimizer.state.values()))["step"],
    }


def poisoned_at(*steps: int):
    """Return a function `prepare` that makes the gradient of rank 1 non-finite at `steps`."""

    def prepare(trainer) -> None:
        real = trainer.forward_backward_step

        def forward_backward_step(*batch):
            loss = real(*batch)
            if trainer.step in steps and os.environ["RANK"] == "1":
                next(p for p in trainer.model_parts[0].lm.parameters() if p.grad is not None).grad.fill_(
                    math.nan
                )
            return loss

        trainer.forward_backward_step = forward_backward_step

    return prepare


def not_finite(rank: int, folder: Path) -> dict:
    results = {}
    for mode in ("disabled", "async"):
        job = dense(f"nan-{mode}", f"--checkpoint.async_mode={mode}")
        results[mode] = refusal(train, *job, "--metrics.log_freq=10", prepare=poisoned_at(5), kind=Diverged)
        results[mode, "names"] = names(folder / f"nan-{mode}" / "checkpoint")
        results[mode, "logged"] = refusal(train, *job, prepare=poisoned_at(5), kind=Diverged)
    # The loss and the gradient of the first step are finite; the weights after it are not.
    options = ("--lr_scheduler.warmup_steps=0", "--checkpoint.interval=1", "--optimizer.lr=1e39")
    results["overflow"] = refusal(train, *dense("overflow", *options), kind=Diverged)
    results["overflow", "names"] = names(folder / "overflow" / "checkpoint")
    options = ("--training.skip_nan_inf", "--training.skip_nan_inf_limit=2")
    results["skipped"] = refusal(
        train, *dense("skipped", *options), prepare=poisoned_at(4, 6, 7), kind=Diverged
    )
    return results


def full(rank: int, folder: Path) -> dict:
    results = {}
    for mode in ("disabled", "async"):
        job = dense(f"full-{mode}", f"--checkpoint.async_mode={mode}")
        train(*job, "--training.steps=2")
        with largest_file(300_000):
            results[f"full {mode}"] = refusal(train, *job, "--training.steps=8", kind=NotSaved)
        results[f"full {mode}", "names"] = names(folder / f"full-{mode}" / "checkpoint")
    return results


def resource_counts() -> dict[str, int]:
    """Return counts of what this process holds: threads, files, objects."""
    present = gc.get_objects()
    tensors = [each for each in present if type(each) is torch.Tensor]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return {
        "meshes": sum(type(each) is DeviceMesh for each in present),
        "tensors": len(tensors),
        "bytes of tensors": sum(storages.values()),
        "open files": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "objects": len(present),
    }


def many_saves(rank: int, folder: Path) -> dict:
    results = {}
    for mode in ("disabled", "async"):
        after = results[mode] = {}

        def prepare(trainer, after=after) -> None:
            save = trainer.checkpointer.save

            def saves(step, is_last=False):
                trainer.checkpointer.wait_for_saving()
                if step in (6, 30):
                    time.sleep(0.5)  # the saving thread releases the state only after it reports the save
                    after[step] = resource_counts()
                return save(step, is_last=is_last)

            trainer.checkpointer.save = saves

        options = ("--checkpoint.interval=1", "--checkpoint.keep_latest_k=2", "--comm.trace_buf_size=0")
        options += (f"--checkpoint.async_mode={mode}", "--training.steps=31")
        train(*dense(f"many-{mode}", *options), prepare=prepare)
    return {"resource_counts": results}


def on_two_ranks(rank: int) -> dict:
    folder = Path(os.environ["TEST_FOLDER"])
    results = {}
    for cases in (goes_back, of_a_stranger, changed_options, not_finite, full, many_saves):
        results |= cases(rank, folder)
    return results


BATCH = ("--training.local_batch_size=1", "--training.global_batch_size=4")
FOUR = {
    "tp 2 x fsdp 2": (TP, "--parallelism.data_parallel_shard_degree=2"),
    "tp 4": ("--parallelism.tensor_parallel_degree=4",),
    "fsdp 4": ("--parallelism.data_parallel_shard_degree=4",),
    "tp 2 x 2 replicas": (TP, "--parallelism.data_parallel_replicate_degree=2"),
    "hsdp": ("--parallelism.data_parallel_replicate_degree=2", "--parallelism.data_parallel_shard_degree=2"),
    "ddp": ("--parallelism.data_parallel_strategy=ddp", "--parallelism.data_parallel_replicate_degree=4"),
}


def state_of(trainer) -> dict:
    """Return the state of training as full tensors: weights, moments, schedule, step, random generators."""
    states, rng = trainer.checkpointer.states, trainer._loaded_rng or trainer.state_dict()["rng"]
    weights = {name: value for model in trainer.model_parts for name, value in model.lm.state_dict().items()}
    tensors = {**weights, **states["optimizer"].state_dict(), "rng": rng["cpu"]}
    tensors["step"] = torch.tensor(trainer.step)
    tensors["epoch"] = torch.tensor(trainer.lr_schedulers.schedulers[0].last_epoch)
    return {name: full_copy(value) for name, value in tensors.items() if isinstance(value, torch.Tensor)}


def resharded(folder: Path, *degrees: str) -> tuple[list[str], dict[int, float]]:
    """Resume from step 4 at other degrees; return the keys of the state that are not bit-identical, and the losses."""
    loaded = {}

    def prepare(trainer) -> None:
        load = trainer.checkpointer.load

        def loads():
            load()
            loaded.update(state_of(trainer))

        trainer.checkpointer.load = loads

    options = (*SAVES, *BATCH, *degrees, "--checkpoint.load_step=4", "--checkpoint.load_only")
    losses = train(folder, "dense", "reshard", *options, prepare=prepare)[0].losses()
    saved = torch.load(folder / "state.pt")
    assert saved.keys() == loaded.keys()
    return [name for name in saved if not torch.equal(saved[name], loaded[name])], losses


def on_four_ranks(rank: int) -> dict:
    folder = Path(os.environ["TEST_FOLDER"])

    def prepare(trainer) -> None:
        save = trainer.checkpointer.save

        def saves(step, is_last=False):
            if step == 4:
                state = state_of(trainer)
                if rank == 0:
                    torch.save(state, folder / "state.pt")
            return save(step, is_last=is_last)

        trainer.checkpointer.save = saves

    first = (*SAVES, *BATCH, *FOUR["tp 2 x fsdp 2"])
    results = {"uninterrupted": train(folder, "dense", "reshard", *first, prepare=prepare)[0].losses()}
    return results | {name: resharded(folder, *degrees) for name, degrees in FOUR.items()}


def on_one_rank(rank: int) -> dict:
    return {"one process": resharded(Path(os.environ["TEST_FOLDER"]))}


@pytest.fixture(scope="module")
def resumed_at(folder):
    return process_groups.run(on_four_ranks, 4) | process_groups.run(on_one_rank, 1)


@pytest.mark.parametrize("degrees", [*FOUR, "one process"])
def test_a_checkpoint_resumes_at_any_degree(resumed_at, degrees):
    differing, losses = resumed_at[degrees]
    assert not differing
    uninterrupted = {step: loss for step, loss in resumed_at["uninterrupted"].items() if step > 4}
    # float32: sums over another number of ranks round differently.
    assert losses == pytest.approx(uninterrupted, rel=1e-5)
    if degrees == "tp 2 x fsdp 2":
        assert losses == uninterrupted


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_inputs(tmp_path_factory.mktemp("jobs"))


@pytest.fixture(scope="module")
def two_ranks(folder):
    return process_groups.run(on_two_ranks, 2)


def test_going_back_uses_a_new_folder_and_keeps_the_old_one(two_ranks):
    uninterrupted = two_ranks["uninterrupted"]
    assert two_ranks["again"] == {step: uninterrupted[step] for step in (5, 6, 7, 8)}
    assert two_ranks["names"] == (["step-2", "step-4", "step-6", "step-8"], ["step-6", "step-8"])


def test_a_restart_by_the_launcher_resumes_from_the_newest(two_ranks):
    assert list(two_ranks["on"]) == [9, 10]
    assert list(two_ranks["restarted"]) == [11, 12]


def test_a_foreign_checkpoint_runs_no_code(two_ranks, folder):
    assert "train_state.step in the checkpoint is damaged" in two_ranks["poisoned"]
    assert not (folder / "ran").exists()


def test_options_that_changed_take_effect_and_are_named_in_one_line(two_ranks):
    changed = {"betas": (0.5, 0.95), "lr": pytest.approx(1e-4)}
    assert two_ranks["groups"] == [changed | {"weight_decay": 0.3}, changed | {"weight_decay": 0.0}]
    assert (two_ranks["name"], two_ranks["step"]) == ("Adam", 6)
    (line,) = two_ranks["lines"]
    for change in (
        'optimizer.name = "AdamW", now "Adam"',
        "optimizer.weight_decay = 0.1, now 0.3",
        "optimizer.beta1 = 0.9, now 0.5",
        "optimizer.lr = 0.003, now 0.0001",
        "training.steps = 4, now 6",
    ):
        assert change in line
    assert "exclude_from_loading" not in line


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_weights_that_are_not_finite_are_never_saved(two_ranks, mode):
    assert two_ranks[mode].startswith("step 6 is not saved")
    advice = "checkpoint is step-4. Start the job again with a lower optimizer.lr"
    assert advice in two_ranks[mode]
    assert "skip_nan_inf" not in two_ranks[mode]  # skipping steps would not help
    assert two_ranks[mode, "names"] == ["step-2", "step-4"]
    assert two_ranks[mode, "logged"].startswith("step 5: the gradient's norm is")
    assert advice in two_ranks[mode, "logged"]
    assert "skip_nan_inf" not in two_ranks[mode, "logged"]


def test_an_update_that_overflows_weights_is_never_saved(two_ranks):
    assert two_ranks["overflow"].startswith("step 1 is not saved")
    assert two_ranks["overflow", "names"] == []


def test_too_many_skipped_steps_in_a_row_end_the_job(two_ranks):
    assert two_ranks["skipped"].startswith("step 7: the gradient was not finite in 2")
    assert "checkpoint is step-6" in two_ranks["skipped"]


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_full_disk_prints_one_line_and_leaves_no_partial_checkpoint(two_ranks, mode, folder):
    path = folder / f"full-{mode}" / "checkpoint"
    assert f"can't be saved in {path} (File too large); " in two_ranks[f"full {mode}"]
    assert "checkpoint is step-2" in two_ranks[f"full {mode}"]
    assert two_ranks[f"full {mode}", "names"] == ["step-2"]
    assert damage(path / "step-2") is None


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_saves_do_not_leak(two_ranks, mode):
    early, late = two_ranks["resource_counts"][mode][6], two_ranks["resource_counts"][mode][30]
    grown = {name: late[name] - early[name] for name in late}
    # 24 saves have been made, and the objects that this test keeps are counted, too.
    assert grown.pop("objects") < 24 * 50
    assert grown.pop("bytes of tensors") < 24 * 8
    assert all(count < 24 for count in grown.values()), grown
