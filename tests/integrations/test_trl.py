"""A split model in TRL's SFTTrainer, compared with the unsplit model in the same trainer."""

import functools
import os

import pytest
import torch
from transformers import AutoTokenizer, Trainer

from examples import trl_sft as example
from examples.transformers_trainer import small_model
from tests.support import process_groups
from tests.support.refusals import refusal
from titanplans import Degrees
from titanplans.integrations.transformers import SplitTrainer

TOLERANCE = 5e-5
"""A relative tolerance, as in test_loops.py."""


def train(rank, folder, degrees, resume=None):
    os.environ["ACCELERATE_USE_CPU"] = "true"
    log = example.train(str(folder), degrees, resume, use_cpu=True, disable_tqdm=True)
    return torch.tensor([(row["loss"], row["grad_norm"]) for row in log if "grad_norm" in row])


@pytest.mark.thorough
def test_losses_and_norms_are_those_of_the_unsplit_model_also_after_resuming(tmp_path):
    def run(name, degrees, resume=None):
        work = functools.partial(train, folder=tmp_path / name, degrees=degrees, resume=resume)
        return process_groups.run(work, 1 if degrees is None else degrees.tp)

    unsplit, split = run("unsplit", None), run("split", Degrees(tp=2))
    assert split.shape == (8, 2)
    torch.testing.assert_close(split, unsplit, rtol=TOLERANCE, atol=0)
    for degrees in (Degrees(tp=2), Degrees(tp=4)):
        resumed = run(f"resumed-{degrees.tp}", degrees, str(tmp_path / "split" / "checkpoint-4"))
        torch.testing.assert_close(resumed[-4:], split[4:], rtol=TOLERANCE, atol=0)
    assert AutoTokenizer.from_pretrained(tmp_path / "split" / "final").pad_token == "<pad>"


def test_a_trainer_of_trl_with_another_loss_is_refused():
    def loss(self, *args): ...

    loss.__module__ = "trl.trainer.dpo_trainer"

    class DPO(SplitTrainer, type("DPOTrainer", (Trainer,), {"compute_loss": loss})):
        pass

    model = small_model()
    model.config.distributed_config = object()
    assert refusal(DPO, model).startswith("DPO: its loss multiplies hidden states by the head's full weight")
