"""A checkpoint of four ranks, resumed at every other way to share the work: the losses are those of one process."""

import os
import shutil
from pathlib import Path

import pytest
import worlds
from test_trainer import losses_of, write_inputs

SAVING = ("--checkpoint.enable", "--checkpoint.interval=4", "--training.steps=8")
TP, REPLICAS = "--parallelism.tensor_parallel_degree", "--parallelism.data_parallel_replicate_degree"
DDP = "--parallelism.data_parallel_strategy=ddp"
DP_2 = ("--training.local_batch_size=2", "--training.global_batch_size=4")
DP_4 = ("--training.local_batch_size=1", "--training.global_batch_size=4")
OTHERS = {
    "tp 4": (f"{TP}=4",),
    "dp 4": DP_4,
    "dp 4, workers": (*DP_4, "--training.dataloader.num_workers=1"),
    "hsdp 2 x 2": (f"{REPLICAS}=2", *DP_4),
    "ddp 4": (DDP, f"{REPLICAS}=4", *DP_4),
    "tp 2 x 2 replicas": (f"{TP}=2", f"{REPLICAS}=2", *DP_2),
}


def on_four_ranks(rank: int) -> dict[str, dict[int, float]]:
    import torch.distributed as dist

    folder = Path(os.environ["TEST_FOLDER"])
    losses = {"tp 2 x dp 2": losses_of(folder, "gla", "saved", f"{TP}=2", *DP_2, *SAVING)}
    for name, options in OTHERS.items():
        dist.barrier()
        if rank == 0:
            copy_step_4(folder, name)
        dist.barrier()
        losses[name] = losses_of(folder, "gla", name, *options, *SAVING)
    return losses


def on_one_rank(rank: int) -> tuple[dict[int, float], dict[int, float]]:
    folder = Path(os.environ["TEST_FOLDER"])
    undisturbed = losses_of(folder, "gla", "undisturbed", "--training.steps=8")
    copy_step_4(folder, "one process")
    return undisturbed, losses_of(folder, "gla", "one process", *SAVING)


def copy_step_4(folder: Path, name: str) -> None:
    shutil.copytree(folder / "saved" / "checkpoint" / "step-4", folder / name / "checkpoint" / "step-4")


@pytest.mark.exhaustive
def test_a_checkpoint_is_resumed_at_every_degree(tmp_path):
    write_inputs(tmp_path)
    losses = worlds.run(on_four_ranks, 4)
    undisturbed, losses["one process"] = worlds.run(on_one_rank, 1)
    assert list(undisturbed) == list(range(1, 9))
    for name, found in losses.items():
        assert list(found) == list(range(1 if name == "tp 2 x dp 2" else 5, 9)), name
        expected = {step: undisturbed[step] for step in found}
        assert found == pytest.approx(expected, rel=1e-5), (
            name
        )  # float32, summed in another order: found 2e-7
