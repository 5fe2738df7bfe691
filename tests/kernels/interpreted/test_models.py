"""Whole models with FLA's kernels against those with stand-ins; and split by their plans, both with kernels."""

import warnings
from contextlib import ExitStack

import pytest
import torch

from tests.support.interpreted.calls import differences, real, widened
from tests.support.interpreted.models import build, families, inputs, packed, variants
from titanplans import Degrees, PlanError, verify

TWO_BLOCKS = 5e-5
"""Relative, in float32: five times what one kernel may differ by."""


def _step(name, given, *, kernels=False, dtype=torch.float32):
    model = build(name, variants(name)[0]).to(dtype)
    with ExitStack() as stack:
        if kernels:
            stack.enter_context(real())
            stack.enter_context(widened())
        out = model(**given)
        out.loss.backward()
    outputs = {"loss": out.loss} if out.logits is None else {"loss": out.loss, "logits": out.logits}
    grads = {key: param.grad for key, param in model.named_parameters() if param.grad is not None}
    return {key: x.detach() for key, x in (outputs | grads).items()}


@pytest.mark.parametrize("kind", ["plain", "documents"])
@pytest.mark.parametrize("name", families())
def test_a_model_is_that_of_the_stand_ins(name, kind):
    config = build(name, variants(name)[0]).config
    given = inputs(config, 70) if kind == "plain" else packed(config)
    if given is None:
        pytest.skip(f"{name} does not keep documents apart")
    kernels, stand_ins = (_step(name, given, kernels=on) for on in (True, False))
    assert kernels.keys() == stand_ins.keys()
    found = differences(kernels, stand_ins, _step(name, given, dtype=torch.float64))
    wrong = [str(one) for one in found if one.is_wrong(TWO_BLOCKS)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("cut", ["tp", "cp"])
@pytest.mark.parametrize("name", families())
def test_a_split_model_is_the_whole_one(name, cut):
    with ExitStack() as stack:
        stack.enter_context(real())
        stack.enter_context(widened())
        warnings.simplefilter("ignore")
        try:
            report = verify(
                lambda: build(name, variants(name)[0]),
                degrees=[Degrees(**{cut: 2})],
                loss_parallel=cut == "tp",
                sequence_parallel=cut == "tp",
                dtype=torch.float32,
                conditions="plain",
            )
        except PlanError as error:
            if cut == "tp" or "context" not in str(error):
                raise
            pytest.skip(str(error)[:200])
    assert report.cases
    assert report.passed, str(report)


@pytest.mark.parametrize("cut", ["tp", "cp"])
def test_with_documents_packed_and_a_fused_loss(cut):
    """Every condition of the proof: several batches, recomputation, a norm, AdamW."""
    small = variants("gla")[0] | dict(num_hidden_layers=1, num_heads=2, num_kv_heads=2)
    with real():
        report = verify(
            lambda: build("gla", small),
            degrees=[Degrees(**{cut: 2})],
            sequence_parallel=True,
            loss_parallel=True,
            dtype=torch.float32,
            conditions="each",
        )
    assert report.cases
    assert report.passed, str(report)
