"""`verify` of adapters with dropout: the unsplit model and every rank draw the same random numbers, or the proof fails."""

import torch
from titanplans.plans.hf.qwen import Qwen3Plan

from tests import zoo
from tests.support.faulty_styles import installed
from titanplans.config import LoRA
from titanplans.parallel import add_adapters
from titanplans.proof import verify


def adapted():
    model = zoo.build("qwen3", num_hidden_layers=1)
    add_adapters(model, LoRA(rank=2, dropout=0.3, target_modules=("q_proj", "o_proj", "down_proj")))
    return model


class FirstColumns(Qwen3Plan):
    """Every rank drops the columns that the first rank drops."""

    def rowwise(self, **options):
        def wrong(original, module, border):
            original(module, border)
            module.lora_dropout.split = (0, *module.lora_dropout.split[1:])

        return installed(super().rowwise(**options), wrong)


def test_dropout_of_adapters_is_proved():
    """Recomputation is included: each thread has its own generator."""
    state = torch.get_rng_state()
    report = verify(adapted, degrees=[2], conditions="each")
    assert report.passed, report.table()
    assert any(case.scenario.recomputed for case in report.cases)
    assert torch.equal(state, torch.get_rng_state())


def test_ranks_that_drop_wrong_columns_are_rejected():
    report = verify(adapted, FirstColumns, degrees=[2], loss_parallel=True, conditions="plain")
    assert not any(case.passed for case in report.cases)
    assert {case.finding.first.name for case in report.cases} == {
        "model.layers.0.self_attn.o_proj.lora_dropout"
    }
