"""Whole models with FLA's kernels against those with stand-ins; and split by their plans, both with kernels."""

import warnings
from contextlib import ExitStack

import pytest
import torch
from calls import real, widened

from models import build, families, inputs, packed, variants
from titanplans import PlanError, verify

ENOUGH = 5e-5
"""Relative, in float32, through two blocks: five times what one kernel may differ by."""
ROUNDING = 8
"""Else kernels, which sum block by block, may be so many times as far from float64 as stand-ins in float32."""


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
    return {key: x.detach().double() for key, x in (outputs | grads).items()}


def _apart(x, y):
    return ((x - y).norm() / y.norm().clamp_min(1e-6)).item()


@pytest.mark.parametrize("kind", ["plain", "documents"])
@pytest.mark.parametrize("name", families())
def test_a_model_is_that_of_the_stand_ins(name, kind):
    config = build(name, variants(name)[0]).config
    given = inputs(config, 70) if kind == "plain" else packed(config)
    if given is None:
        pytest.skip(f"{name} does not keep documents apart")
    kernels, stand_ins = (_step(name, given, kernels=on) for on in (True, False))
    assert kernels.keys() == stand_ins.keys()
    wrong = {key: x for key, x in kernels.items() if _apart(x, stand_ins[key]) > ENOUGH}
    if wrong:
        exact = _step(name, given, dtype=torch.float64)
        far = {key: (_apart(x, exact[key]), _apart(stand_ins[key], exact[key])) for key, x in wrong.items()}
        assert all(kernel <= ROUNDING * stand_in + ENOUGH for kernel, stand_in in far.values()), far


@pytest.mark.parametrize("cut", ["tp", "cp"])
@pytest.mark.parametrize("name", families())
def test_a_split_model_is_the_whole_one(name, cut):
    given = dict(degrees=(2,)) if cut == "tp" else dict(contexts=(2,))
    with ExitStack() as stack:
        stack.enter_context(real())
        stack.enter_context(widened())
        warnings.simplefilter("ignore")
        try:
            report = verify(
                lambda: build(name, variants(name)[0]),
                **given,
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


def test_with_documents_packed_and_a_fused_loss():
    """Every condition of the proof: several batches, recomputation, a norm, AdamW."""
    with real():
        report = verify(
            lambda: build("gla", variants("gla")[0]),
            degrees=(2,),
            contexts=(1, 2),
            sequence_parallel=True,
            loss_parallel=True,
            dtype=torch.float32,
            conditions="each",
        )
    assert len(report.cases) > 1
    assert report.passed, str(report)
