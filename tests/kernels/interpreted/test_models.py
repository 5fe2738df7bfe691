"""Models with FLA's kernels agree with the same models with stand-ins, and plans are proved with the kernels."""

import warnings
from contextlib import ExitStack

import pytest
import torch

from tests.support.interpreted.calls import differences, real, widened
from tests.support.interpreted.models import build, families, inputs, packed, variants
from titanplans import Degrees, PlanError, verify

TWO_BLOCKS = 5e-5
"""Relative tolerance in float32 for a model of two blocks, which is five times the tolerance for one kernel."""


def _step(name, batch, *, kernels=False, dtype=torch.float32):
    model = build(name, variants(name)[0]).to(dtype)
    with ExitStack() as stack:
        if kernels:
            stack.enter_context(real())
            stack.enter_context(widened())
        out = model(**batch)
        out.loss.backward()
    outputs = {"loss": out.loss} if out.logits is None else {"loss": out.loss, "logits": out.logits}
    grads = {key: param.grad for key, param in model.named_parameters() if param.grad is not None}
    return {key: x.detach() for key, x in (outputs | grads).items()}


@pytest.mark.parametrize("kind", ["plain", "documents"])
@pytest.mark.parametrize("name", families())
def test_a_model_with_kernels_equals_that_with_stand_ins(name, kind):
    config = build(name, variants(name)[0]).config
    batch = inputs(config, 70) if kind == "plain" else packed(config)
    if batch is None:
        pytest.skip(f"{name} does not keep documents apart")
    kernels, stand_ins = (_step(name, batch, kernels=on) for on in (True, False))
    assert kernels.keys() == stand_ins.keys()
    compared = differences(kernels, stand_ins, _step(name, batch, dtype=torch.float64))
    wrong = [str(difference) for difference in compared if difference.is_wrong(TWO_BLOCKS)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("dimension", ["tp", "cp"])
@pytest.mark.parametrize("name", families())
def test_a_split_model_trains_as_the_unsplit_one(name, dimension):
    with ExitStack() as stack:
        stack.enter_context(real())
        stack.enter_context(widened())
        warnings.simplefilter("ignore")
        try:
            report = verify(
                lambda: build(name, variants(name)[0]),
                degrees=[Degrees(**{dimension: 2})],
                loss_parallel=dimension == "tp",
                sequence_parallel=dimension == "tp",
                dtype=torch.float32,
                conditions="plain",
            )
        except PlanError as error:
            if dimension == "tp" or "context" not in str(error):
                raise
            pytest.skip(str(error)[:200])
    assert report.cases
    assert report.passed, str(report)


@pytest.mark.parametrize("dimension", ["tp", "cp"])
def test_a_split_model_trains_as_the_unsplit_one_in_every_condition(dimension):
    """The conditions of the proof include several batches, recomputation, a norm, and AdamW."""
    small = variants("gla")[0] | dict(num_hidden_layers=1, num_heads=2, num_kv_heads=2)
    with real():
        report = verify(
            lambda: build("gla", small),
            degrees=[Degrees(**{dimension: 2})],
            sequence_parallel=True,
            loss_parallel=True,
            dtype=torch.float32,
            conditions="each",
        )
    assert report.cases
    assert report.passed, str(report)
