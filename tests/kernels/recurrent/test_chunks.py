"""Chunked linear attention equals a loop over time in float64, in float32, and with extreme gates."""

import pytest
import torch
import torch.nn.functional as F

from tests.support.gradient_comparison import same, weighed
from titanplans.kernels.recurrent.chunks import linear_attention

BATCH, HEADS, KEY, VALUE = 2, 3, 8, 12


def recurrence(q, k, v, g, state, a, b):
    """Loop over tokens: S_t = exp(g_t) S_(t-1) + b_t (a_t^T S_(t-1)) + k_t v_t^T, o_t = S_t^T q_t."""
    outputs = []
    for t in range(q.shape[1]):
        read = 0 if a is None else (a[:, t, :, :, None] * state).sum(-2, keepdim=True) * b[:, t, :, :, None]
        state = state * g[:, t].exp()[..., None] + read + k[:, t, :, :, None] * v[:, t, :, None, :]
        outputs.append((q[:, t, :, :, None] * state).sum(-2))
    return torch.stack(outputs, 1), state


def inputs(length, *, gate=1.0, dtype=torch.float64, vectors=True, corrected=False):
    """Return q, k, v, g, a state, a and b. `gate` scales the log-sigmoid gates, which have a mean of -0.8."""
    rng = torch.Generator().manual_seed(0)
    q, k, g, e = torch.randn(4, BATCH, length, HEADS, KEY, dtype=torch.float64, generator=rng)
    v = torch.randn(BATCH, length, HEADS, VALUE, dtype=torch.float64, generator=rng)
    state = torch.randn(BATCH, HEADS, KEY, VALUE, dtype=torch.float64, generator=rng)
    g = F.logsigmoid(g if vectors else g[..., :1]) * gate
    normalized = F.normalize(e, dim=-1)
    corrections = (normalized * g.exp(), -0.7 * normalized) if corrected else ()
    return [x.to(dtype).requires_grad_() for x in (q, k, v, g, state, *corrections)]


def outputs(function, leaves):
    return function(*leaves, *([None] * (7 - len(leaves))))


def computed(function, leaves):
    results = outputs(function, leaves)
    return [*results, *torch.autograd.grad(weighed(results), leaves)]


def by_chunks(q, k, v, g, state, a, b):
    return linear_attention(q, k, v, g if g.shape[-1] == KEY else g[..., 0], state, a=a, b=b)


@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("vectors", [False, True])
@pytest.mark.parametrize("gate", [1 / 16, 1.0, 30.0], ids=["layer", "strong", "extreme"])
@pytest.mark.parametrize("length", [1, 2, 7, 63, 64, 65, 130])
def test_chunks_equal_the_recurrence_in_float64(length, gate, vectors, corrected):
    # 1e-12: sums of some hundred terms of order 1 to 100, with a unit roundoff of 1e-16.
    leaves = inputs(length, gate=gate, vectors=vectors, corrected=corrected)
    same(outputs(by_chunks, leaves), outputs(recurrence, leaves), leaves)


def test_gates_of_minus_five_per_step_are_exact_in_float32():
    # The factored form exp(b_i) exp(-b_j) would need exp(320) inside one chunk.
    leaves = inputs(130, dtype=torch.float32)
    with torch.no_grad():
        leaves[3].fill_(-5.0)
    want = computed(recurrence, [x.detach().double().requires_grad_() for x in leaves])
    # Gradients are compared relative to themselves. The gates' gradient is exp(-5) times smaller, without cancellation.
    for a, b in zip(computed(by_chunks, leaves), want, strict=True):
        assert (a - b).abs().max() <= 2e-6 * b.abs().max()


def test_gradcheck():
    leaves = [x.detach()[:1].requires_grad_() for x in inputs(9, corrected=True)]
    assert torch.autograd.gradcheck(by_chunks, leaves, fast_mode=True)
