"""Kernels of FLA and of this project's loss that no layer of the families calls agree with their stand-ins."""

import pytest
import torch
from fla.modules.activations import ops
from fla.modules.causal_conv1d.ops import causal_conv1d_update_states
from fla.modules.fused_cross_entropy.ops import cross_entropy_loss
from fla.modules.norm.fused_norm_gate import rms_norm_swish_gate_linear
from fla.ops.mesa_net import chunk_mesa_net
from fla.ops.rwkv7 import fused_mul_recurrent_rwkv7
from fla.ops.utils.pooling import mean_pooling

from tests.support.interpreted.calls import TOLERANCE, real, widened
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
    "logarithm of a sigmoid": (_activation("LogSigmoidFunction", 2.0), [ROWS], True),
    "ELU plus one": (_activation("ELUPlusOneFunction"), [ROWS], True),
    "fast GELU": (_activation("FastGeLUFunction"), [ROWS], True),
    "GELU of a bias": (_activation("GeLUFunction"), [ROWS, (48,)], True),
    "PowGLU": (_activation("PowGLUFunction", 2.0), [ROWS, ROWS], True),
    "PowGLU and a projection": (_activation("PowGLULinearFunction", 2.0), [ROWS, ROWS, WEIGHT, (64,)], True),
    "a gated norm and a projection": (_gated_norm, [ROWS, ROWS, WEIGHT, (64,)], True),
    "states of a convolution": (_states_after, [(2, 70, 48), (2, 48, 4)], False),
    "mean pooling": (_pooled, [HEADS], True),
    "cross entropy": (_entropy, [(70, 96)], True),
    "RWKV-7, token by token": (_rwkv7, [HEADS] * 6, False),
}
"""Each function by name, with the shapes of its inputs and whether it has a backward."""


@pytest.mark.parametrize("name", FUNCTIONS)
def test_kernels_that_no_layer_calls_agree(name):
    with real():
        kernel = _of(*FUNCTIONS[name])
    for x, y in zip(kernel, _of(*FUNCTIONS[name]), strict=True):
        assert (x - y).norm() <= TOLERANCE * y.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("summed", [False, True])
def test_kernels_of_the_loss_compute_what_operators_compute(dtype, summed, monkeypatch):
    """The shard of the vocabulary has more columns than a program loads at once, and some labels are on other ranks."""
    monkeypatch.setattr(kernels, "COLUMNS", 64)
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(9, 150, generator=generator)).to(dtype)
    mine = torch.tensor([True] * 7 + [False] * 2)
    index = torch.where(mine, torch.randint(150, (9,), generator=generator), 0)
    scale, own, shift = torch.rand(3, 9, generator=generator)
    factors = (scale, own * mine, shift * summed)
    results = []
    for read in (kernels.read, operators.read_by_operators):
        statistics, gradient = read(logits.clone(), mine, index, summed)
        log_sum = statistics[0]
        results.append([*statistics[: 3 if summed else 2], gradient(log_sum, *factors)])
    for x, y in zip(*results, strict=True):
        bound = 2**-8 if x.dtype == torch.bfloat16 else TOLERANCE
        assert (x.double() - y.double()).norm() <= bound * y.double().norm()


@pytest.mark.parametrize(
    ("scale", "least", "most"), [(1, 2e-4, 2e-3), (1e-2, 5e-3, 0.05), (1e-4, 0.3, 0.9), (1e-6, 0.98, 1.02)]
)
def test_gradients_of_mesa_net_are_lost_where_they_are_small(scale, least, most):
    """The kernel adds 1e-5 to the squares that it divides by. Without this addition it would agree at every scale."""
    shape = (1, 70, 2, 16)

    def queries_gradient(dtype=torch.float32):
        generator = torch.Generator().manual_seed(0)
        q, k, v, weights = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(4))
        g, beta = torch.rand(2, *shape[:3], generator=generator, dtype=torch.float64)
        q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
        leaves = [x.to(dtype).requires_grad_() for x in (q, k, v, -g, beta, torch.ones(2, 16))]
        outputs, *_ = chunk_mesa_net(*leaves)
        (outputs * weights.to(dtype) * scale).sum().backward()
        return leaves[0].grad.double()

    exact = queries_gradient(torch.float64)
    with real():
        kernel = queries_gradient()
        with widened():
            to_the_end = queries_gradient()
    assert least < (kernel - exact).norm() / exact.norm() < most
    assert (to_the_end - exact).norm() <= TOLERANCE * exact.norm()
