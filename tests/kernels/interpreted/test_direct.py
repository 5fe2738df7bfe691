"""Kernels that no layer of the families calls: FLA's other activations, a norm; and those of this project."""

import pytest
import torch
from fla.modules.activations import ops
from fla.modules.causal_conv1d.ops import causal_conv1d_update_states
from fla.modules.fused_cross_entropy.ops import cross_entropy_loss
from fla.modules.norm.fused_norm_gate import rms_norm_swish_gate_linear
from fla.ops.mesa_net import chunk_mesa_net
from fla.ops.rwkv7 import fused_mul_recurrent_rwkv7
from fla.ops.utils.pooling import mean_pooling

from tests.support.interpreted.calls import ENOUGH, real, widened
from titanplans.loss import kernels, operators


def _of(function, shapes, backward):
    generator = torch.Generator().manual_seed(0)
    leaves = [torch.randn(shape, generator=generator).requires_grad_(backward) for shape in shapes]
    outputs = function(*leaves)
    total = (outputs * torch.linspace(-1, 2, outputs.numel()).view_as(outputs)).sum()
    return [outputs.detach(), *(torch.autograd.grad(total, leaves) if backward else ())]


def _activation(name, *further):
    return lambda *tensors: getattr(ops, name).apply(*tensors, *further)


def _gated_norm(x, gate, projection, bias):
    return rms_norm_swish_gate_linear(x, gate, torch.linspace(0.5, 1.5, 48), None, projection, bias)


def _states_after(x, initial):
    return causal_conv1d_update_states(x, 4, initial)


def _pooled(x):
    return mean_pooling(x, 32)


def _entropy(logits):
    target = torch.arange(70).where(torch.arange(70) % 7 > 0, -100)
    return cross_entropy_loss(logits, target, label_smoothing=0.1, lse_square_scale=1e-3)[0]


def _rwkv7(r, w, k, v, kk, a):
    kk = torch.nn.functional.normalize(kk, dim=-1)
    return fused_mul_recurrent_rwkv7(r, -w.exp(), k, v, kk, a.sigmoid(), scale=0.5)[0]


ROWS, WEIGHT, HEADS = (3, 70, 48), (64, 48), (1, 70, 2, 16)
FUNCTIONS = {
    "sigmoid": (_activation("SigmoidFunction"), [ROWS], True),
    "its logarithm": (_activation("LogSigmoidFunction", 2.0), [ROWS], True),
    "ELU plus one": (_activation("ELUPlusOneFunction"), [ROWS], True),
    "fast GELU": (_activation("FastGeLUFunction"), [ROWS], True),
    "GELU of a bias": (_activation("GeLUFunction"), [ROWS, (48,)], True),
    "PowGLU": (_activation("PowGLUFunction", 2.0), [ROWS, ROWS], True),
    "PowGLU and a projection": (_activation("PowGLULinearFunction", 2.0), [ROWS, ROWS, WEIGHT, (64,)], True),
    "a gated norm and a projection": (_gated_norm, [ROWS, ROWS, WEIGHT, (64,)], True),
    "the states of a convolution": (_states_after, [(2, 70, 48), (2, 48, 4)], False),
    "mean pooling": (_pooled, [HEADS], True),
    "cross entropy": (_entropy, [(70, 96)], True),
    "RWKV-7, token by token": (_rwkv7, [HEADS] * 6, False),
}
"""The function, its inputs' shapes, and whether it has a backward."""


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_kernel_that_no_layer_calls(name):
    with real():
        kernel = _of(*FUNCTIONS[name])
    for x, y in zip(kernel, _of(*FUNCTIONS[name]), strict=True):
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


@pytest.mark.parametrize(
    ("scale", "least", "most"), [(1, 2e-4, 2e-3), (1e-2, 5e-3, 0.05), (1e-4, 0.3, 0.9), (1e-6, 0.98, 1.02)]
)
def test_mesa_nets_gradient_is_lost_where_it_is_small(scale, least, most):
    """Its kernel adds 1e-5 to squares that it divides by. Without, it agrees at every size."""
    shape = (1, 70, 2, 16)

    def queries_gradient(dtype=torch.float32):
        generator = torch.Generator().manual_seed(0)
        q, k, v, weights = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(4))
        g, beta = torch.rand(2, *shape[:3], generator=generator, dtype=torch.float64)
        q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
        given = [x.to(dtype).requires_grad_() for x in (q, k, v, -g, beta, torch.ones(2, 16))]
        outputs, *_ = chunk_mesa_net(*given)
        (outputs * weights.to(dtype) * scale).sum().backward()
        return given[0].grad.double()

    exact = queries_gradient(torch.float64)
    with real():
        kernel = queries_gradient()
        with widened():
            to_the_end = queries_gradient()
    assert least < (kernel - exact).norm() / exact.norm() < most
    assert (to_the_end - exact).norm() <= ENOUGH * exact.norm()
