"""Chunked gated linear attention against a loop over time: in float64, in float32, packed, with states, and wild gates."""

import math

import pytest
import torch
import torch.nn.functional as F

from titanplans.kernels import KernelError
from titanplans.kernels.recurrent.gla import chunk_gla, fused_recurrent_gla

BATCH, HEADS, KEY, VALUE = 2, 3, 8, 12


def recurrence(q, k, v, g, scale, state):
    """S_t = exp(g_t) S_{t-1} + k_t v_t^T, o_t = scale S_t^T q_t, one token after another."""
    outputs = []
    for t in range(q.shape[1]):
        state = state * g[:, t].exp()[..., None] + k[:, t, :, :, None] * v[:, t, :, None, :]
        outputs.append(scale * (q[:, t, :, :, None] * state).sum(-2))
    return torch.stack(outputs, 1), state


def inputs(seq_len, *, batch=BATCH, gate=1.0, dtype=torch.float64, seed=0):
    """q, k, v, g and an initial state; `gate` scales log-sigmoid gates, whose mean is -0.8."""
    rng = torch.Generator().manual_seed(seed)
    q, k, g = torch.randn(3, batch, seq_len, HEADS, KEY, dtype=torch.float64, generator=rng)
    v = torch.randn(batch, seq_len, HEADS, VALUE, dtype=torch.float64, generator=rng)
    state = torch.randn(batch, HEADS, KEY, VALUE, dtype=torch.float64, generator=rng)
    return [x.to(dtype).requires_grad_() for x in (q, k, v, F.logsigmoid(g) * gate, state)]


def with_gradients(outputs, leaves):
    """Outputs and the gradients of a sum of them that weighs every element differently."""
    loss = sum((x * torch.linspace(-1, 2, x.numel(), dtype=x.dtype).view_as(x)).sum() for x in outputs)
    return [*outputs, *torch.autograd.grad(loss, leaves)]


def assert_all_close(got, want, tolerance):
    """Error of each tensor relative to its own largest element."""
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape
        assert a.isfinite().all()
        assert (a - b).abs().max() <= tolerance * max(1.0, b.abs().max().item())


@pytest.mark.parametrize("gate", [1 / 16, 1.0, 30.0], ids=["layer", "strong", "extreme"])
@pytest.mark.parametrize("seq_len", [1, 2, 7, 63, 64, 65, 130])
def test_equals_the_recurrence_in_float64(seq_len, gate):
    # 1e-12: sums of some hundred terms of order 1 to 100, with a unit roundoff of 1e-16.
    leaves = inputs(seq_len, gate=gate)
    q, k, v, g, state = leaves
    want = with_gradients(recurrence(q, k, v, g, KEY**-0.5, state), leaves)
    got = with_gradients(chunk_gla(q, k, v, g, initial_state=state, output_final_state=True), leaves)
    assert got[0].dtype == got[1].dtype == torch.float64
    assert_all_close(got, want, 1e-12)


def test_gates_of_minus_five_per_step_lose_nothing_in_float32():
    # The factored form exp(b_i) exp(-b_j) would need exp(320) inside one chunk.
    leaves = inputs(130, dtype=torch.float32)
    with torch.no_grad():
        leaves[3].fill_(-5.0)
    q, k, v, g, state = leaves
    got = with_gradients(chunk_gla(q, k, v, g, initial_state=state, output_final_state=True), leaves)
    doubles = [x.detach().double().requires_grad_() for x in leaves]
    want = with_gradients(recurrence(*doubles[:4], KEY**-0.5, doubles[4]), doubles)
    # Each gradient relative to itself, the gates' too: it is exp(-5) times smaller, and is no difference of large sums.
    for a, b in zip(got, want, strict=True):
        assert (a - b).abs().max() <= 2e-6 * b.abs().max()


def test_gates_that_forget_everything_cut_the_sequence():
    q, k, v, g, _ = inputs(100)
    cut = g.detach().clone()
    cut[:, 40] = -math.inf
    o, _ = chunk_gla(q, k, v, cut)
    alone, _ = chunk_gla(*(x[:, 40:] for x in (q, k, v, g)))
    assert_all_close([o[:, 40:]], [alone], 1e-13)


@pytest.mark.parametrize("seq_len", [5, 64, 100])
def test_equals_flas_naive_reference_in_float32(seq_len):
    from fla.ops.gla.naive import naive_recurrent_gla

    leaves = inputs(seq_len, dtype=torch.float32)
    q, k, v, g, state = leaves
    want = with_gradients(
        naive_recurrent_gla(q, k, v, g, initial_state=state, output_final_state=True), leaves
    )
    got = with_gradients(chunk_gla(q, k, v, g, initial_state=state, output_final_state=True), leaves)
    assert_all_close(got, want, 5e-6)  # both round in float32: 64 steps of 6e-8


@pytest.mark.parametrize("state_v_first", [False, True])
@pytest.mark.parametrize("function", [chunk_gla, fused_recurrent_gla])
def test_packed_sequences_equal_one_call_each(function, state_v_first):
    lengths = [3, 64, 1, 90, 0, 70]
    boundaries = torch.tensor([0, *lengths]).cumsum(0)
    q, k, v, g, _ = inputs(sum(lengths), batch=1)
    states = torch.randn(len(lengths), HEADS, KEY, VALUE, dtype=torch.float64)
    states = (states.transpose(-1, -2).contiguous() if state_v_first else states).requires_grad_()
    leaves = [q, k, v, g, states]
    options = dict(output_final_state=True, state_v_first=state_v_first, scale=0.3)

    got = with_gradients(function(q, k, v, g, initial_state=states, cu_seqlens=boundaries, **options), leaves)
    parts = [
        function(*(x[:, begin:end] for x in (q, k, v, g)), initial_state=states[n : n + 1], **options)
        for n, (begin, end) in enumerate(zip(boundaries[:-1].tolist(), boundaries[1:].tolist(), strict=True))
    ]
    outputs = torch.cat([o for o, _ in parts], 1), torch.cat([s for _, s in parts])
    assert_all_close(got, with_gradients(outputs, leaves), 1e-12)


def test_state_layout_and_scale():
    q, k, v, g, state = inputs(20)
    o, final = chunk_gla(q, k, v, g, 0.7, state, True)
    swapped = state.transpose(-1, -2)
    o_swapped, final_swapped = chunk_gla(q, k, v, g, 0.7, swapped, True, state_v_first=True)
    want, want_final = recurrence(q, k, v, g, 0.7, state)
    assert_all_close([o, final, o_swapped, final_swapped.transpose(-1, -2)], [want, want_final] * 2, 1e-12)
    assert chunk_gla(q, k, v, g)[1] is None


@pytest.mark.parametrize("packed", [False, True])
def test_reverse_runs_from_the_last_token(packed):
    q, k, v, g, _ = inputs(20, batch=1)
    boundaries = torch.tensor([0, 8, 20]) if packed else None
    states = torch.randn(2 if packed else 1, HEADS, KEY, VALUE, dtype=torch.float64)
    options = dict(initial_state=states, output_final_state=True, cu_seqlens=boundaries)
    o, final = fused_recurrent_gla(q, k, v, g, reverse=True, **options)
    for n, (begin, end) in enumerate([(0, 8), (8, 20)] if packed else [(0, 20)]):
        part = [x[:, begin:end].flip(1) for x in (q, k, v, g)]
        want, want_final = recurrence(*part, KEY**-0.5, states[n : n + 1])
        assert_all_close([o[:, begin:end], final[n : n + 1]], [want.flip(1), want_final], 1e-12)


def test_no_gate_is_a_gate_of_zero():
    q, k, v, g, _ = inputs(20)
    assert torch.equal(fused_recurrent_gla(q, k, v)[0], chunk_gla(q, k, v, torch.zeros_like(g))[0])


def test_gradcheck():
    leaves = [x.detach()[:1, :, :1].requires_grad_() for x in inputs(9)[:4]]
    state = torch.randn(1, 1, KEY, VALUE, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda *x: chunk_gla(*x[:4], initial_state=x[4], output_final_state=True),
        (*leaves, state),
        fast_mode=True,
    )


def test_bfloat16_is_accumulated_in_float32():
    q, k, v, g, state = inputs(100, dtype=torch.bfloat16)
    o, final = chunk_gla(q, k, v, g, initial_state=state.float(), output_final_state=True)
    assert (o.dtype, final.dtype) == (torch.bfloat16, torch.float32)
    want, want_final = chunk_gla(
        *(x.float() for x in (q, k, v, g)), initial_state=state.float(), output_final_state=True
    )
    assert torch.equal(o, want.bfloat16())
    assert torch.equal(final, want_final)
    with torch.autocast("cpu", torch.bfloat16):
        under_autocast, _ = chunk_gla(*(x.float() for x in (q, k, v, g)), initial_state=state.float())
    assert torch.equal(under_autocast, want)


def test_one_graph_under_compile():
    q, k, v, g, _ = leaves = inputs(70)
    function = torch.compile(lambda *x: chunk_gla(*x)[0], fullgraph=True, backend="aot_eager")
    got = with_gradients([function(q, k, v, g)], leaves[:4])
    assert_all_close(got, with_gradients([chunk_gla(q, k, v, g)[0]], leaves[:4]), 1e-14)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(v=torch.zeros(1, 4, 2, 5)), "v \\(1, 4, 2, 5\\)"),
        (dict(initial_state=torch.zeros(1, 3, 5, 8)), "initial_state"),
        (dict(cu_seqlens=torch.tensor([0, 3])), "must rise from 0 to T=4"),
        (dict(gv=torch.zeros(1, 4, 3, 5)), "gv"),
        (dict(transpose_state_layout=True), "transpose_state_layout"),
    ],
)
def test_what_is_not_computed_is_refused(change, message):
    arguments = dict(q=torch.zeros(1, 4, 3, 8), k=torch.zeros(1, 4, 3, 8), v=torch.zeros(1, 4, 3, 5))
    with pytest.raises(KernelError, match=message):
        fused_recurrent_gla(**{**arguments, **change})


def test_packing_needs_batch_size_one():
    q, k, v, g, _ = inputs(4)
    with pytest.raises(KernelError, match="batch size 2"):
        chunk_gla(q, k, v, g, cu_seqlens=torch.tensor([0, 4]))
