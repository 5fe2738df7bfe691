"""Kernels that no layer of the families calls: FLA's other activations, a norm; and those of this project."""

import pytest
import torch
from calls import real
from fla.modules.activations import ops
from fla.modules.norm.fused_norm_gate import rms_norm_swish_gate_linear

from titanplans.loss import kernels, operators

ENOUGH = 1e-5


def _of(function, *shapes):
    generator = torch.Generator().manual_seed(0)
    leaves = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    outputs = function(*leaves)
    grads = torch.autograd.grad(
        (outputs * torch.linspace(-1, 2, outputs.numel()).view_as(outputs)).sum(), leaves
    )
    return [outputs.detach(), *grads]


ROWS, WEIGHT = (3, 70, 48), (64, 48)
FUNCTIONS = {
    "SigmoidFunction": (ROWS,),
    "LogSigmoidFunction": (ROWS,),
    "ELUPlusOneFunction": (ROWS,),
    "FastGeLUFunction": (ROWS,),
    "GeLUFunction": (ROWS, (48,)),
    "PowGLUFunction": (ROWS, ROWS),
    "PowGLULinearFunction": (ROWS, ROWS, WEIGHT, (64,)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_activation(name):
    def call(*tensors):
        further = (2.0,) if name in ("LogSigmoidFunction", "PowGLUFunction", "PowGLULinearFunction") else ()
        return getattr(ops, name).apply(*tensors, *further)

    with real():
        kernel = _of(call, *FUNCTIONS[name])
    for x, y in zip(kernel, _of(call, *FUNCTIONS[name]), strict=True):
        assert (x - y).norm() <= ENOUGH * y.norm()


def test_a_gated_norm_with_a_projection():
    weight = torch.linspace(0.5, 1.5, 48)

    def call(x, gate, projection, bias):
        return rms_norm_swish_gate_linear(x, gate, weight, None, projection, bias)

    with real():
        kernel = _of(call, ROWS, ROWS, WEIGHT, (64,))
    for x, y in zip(kernel, _of(call, ROWS, ROWS, WEIGHT, (64,)), strict=True):
        assert (x - y).norm() <= ENOUGH * y.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("summed", [False, True])
def test_the_loss_reads_and_overwrites_logits_as_torchs_operators(dtype, summed, monkeypatch):
    """Over more columns than a program has at once, a vocabulary's share, and labels that are elsewhere."""
    monkeypatch.setattr(kernels, "COLUMNS", 64)
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(9, 150, generator=generator)).to(dtype)
    mine = torch.tensor([True] * 7 + [False] * 2)
    index = torch.where(mine, torch.randint(150, (9,), generator=generator), 0)
    scale, own, shift = torch.rand(3, 9, generator=generator)
    given = (scale, own * mine, shift * summed)
    found = []
    for read in (kernels.read, operators.read_by_operators):
        statistics, gradient = read(logits.clone(), mine, index, summed)
        log_sum = statistics[0]
        found.append([*statistics[: 3 if summed else 2], gradient(log_sum, *given)])
    for x, y in zip(*found, strict=True):
        bound = 2**-8 if x.dtype == torch.bfloat16 else ENOUGH
        assert (x.double() - y.double()).norm() <= bound * y.double().norm()
