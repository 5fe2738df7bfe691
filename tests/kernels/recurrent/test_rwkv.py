"""RWKV and HGRN operators on a CPU equal references of FLA and a direct formula."""

import pytest
import torch

from tests.support.gradient_comparison import same
from titanplans.kernels.recurrent import chunks, rwkv
from titanplans.kernels.widen import Widen

pytestmark = pytest.mark.usefixtures("cpu_kernels")


def randn(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def compare(ours, theirs, inputs):
    """Compare outputs, final states and the gradients of all inputs."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    with Widen(torch.float64):
        answers = [function(*leaves) for function in (ours, theirs)]
    same(*answers, leaves)


def heads_first(x):
    return x.transpose(1, 2)


@pytest.fixture(autouse=True)
def seed(monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(chunks, "CHUNK_SIZE", 4)


def test_rwkv6_equals_the_reference_of_fla():
    from fla.ops.rwkv6 import chunk_rwkv6, fused_recurrent_rwkv6
    from fla.ops.rwkv6.recurrent_naive import naive_recurrent_rwkv6

    def theirs(r, k, v, w, u, state):
        o, final = naive_recurrent_rwkv6(
            *map(heads_first, (r, k, v, w)), u, initial_state=state, output_final_state=True
        )
        return heads_first(o), final

    r, k, w = (randn(2, 9, 3, 4) for _ in range(3))
    inputs = [r, k, randn(2, 9, 3, 5), -w.exp(), randn(3, 4), randn(2, 3, 4, 5)]
    for ours in (chunk_rwkv6, fused_recurrent_rwkv6):
        compare(lambda *x, ours=ours: ours(*x[:5], None, x[5], True), theirs, inputs)


def test_rwkv7_equals_the_reference_of_fla():
    from fla.ops.generalized_delta_rule.dplr.naive import dplr_recurrence
    from fla.ops.rwkv7 import chunk_rwkv7, fused_mul_recurrent_rwkv7

    def theirs(r, w, k, v, kk, a, state):
        o, final = dplr_recurrence(*map(heads_first, (r, k, v, -kk, kk * a, w)), initial_state=state)
        return heads_first(o), final

    r, w, k, a = (randn(2, 9, 3, 4) for _ in range(4))
    kk = torch.nn.functional.normalize(randn(2, 9, 3, 4), dim=-1)
    inputs = [r, -w.exp(), k, randn(2, 9, 3, 5), kk, a.sigmoid(), randn(2, 3, 4, 5)]
    options = dict(scale=0.5, output_final_state=True)
    compare(lambda *x: fused_mul_recurrent_rwkv7(*x[:6], initial_state=x[6], **options), theirs, inputs)

    def chunked(r, w, k, v, kk, a, state):
        return chunk_rwkv7(r, w, k, v, -kk, kk * a, initial_state=state, **options)

    compare(chunked, theirs, inputs)


def test_hgrn_equals_the_sum_of_decayed_inputs():
    def direct(x, g, state):
        past = g.cumsum(1)
        later = torch.ones(9, 9, dtype=torch.bool).tril()[None, :, :, None]
        decay = (past[:, :, None] - past[:, None]).masked_fill(~later, -torch.inf).exp()
        o = torch.einsum("bijd,bjd->bid", decay, x) + past.exp() * state[:, None]
        return o, o[:, -1]

    from fla.ops.hgrn import chunk_hgrn, fused_recurrent_hgrn

    inputs = [randn(2, 9, 6), -randn(2, 9, 6).exp(), randn(2, 6)]
    for ours in (chunk_hgrn, fused_recurrent_hgrn):
        compare(lambda x, g, state, ours=ours: ours(x, g, state, True), direct, inputs)


def test_packed_sequences_are_separate():
    from fla.ops.rwkv6 import chunk_rwkv6

    bounds = torch.tensor([0, 4, 9])
    r, k, v, w, u = (
        randn(1, 9, 2, 3),
        randn(1, 9, 2, 3),
        randn(1, 9, 2, 3),
        -randn(1, 9, 2, 3).exp(),
        randn(2, 3),
    )
    o, states = chunk_rwkv6(r, k, v, w, u, output_final_state=True, cu_seqlens=bounds)
    for n, tokens in enumerate((slice(0, 4), slice(4, 9))):
        alone, state = chunk_rwkv6(
            r[:, tokens], k[:, tokens], v[:, tokens], w[:, tokens], u, output_final_state=True
        )
        torch.testing.assert_close(o[:, tokens], alone)
        torch.testing.assert_close(states[n : n + 1], state)
    from fla.modules.token_shift import token_shift_ref

    x = randn(1, 9, 5)
    delta, last = rwkv.token_shift(x, bounds, None, True)
    torch.testing.assert_close(delta, token_shift_ref(x, bounds))
    torch.testing.assert_close(last, x[0, [3, 8]])


def test_the_token_shift_continues_from_its_cache():
    x = randn(2, 6, 5)
    full, _ = rwkv.token_shift(x)
    _, last = rwkv.token_shift(x[:, :4], output_cache=True)
    torch.testing.assert_close(rwkv.token_shift(x[:, 4:], cache=last)[0], full[:, 4:])


def test_the_pointwise_kernels_equal_the_references_of_fla():
    from fla.ops.rwkv7.fused_addcmul import torch_addcmul_rwkv7
    from fla.ops.rwkv7.fused_k_update import k_update_ref
    from fla.ops.rwkv7.gate_output_correction import gate_output_correction_ref

    x, delta, *weights = randn(2, 4, 6), randn(2, 4, 6), *(randn(1, 1, 6) for _ in range(6))
    for ours, theirs in zip(
        rwkv.addcmul(x, delta, *weights), torch_addcmul_rwkv7(x, delta, *weights), strict=True
    ):
        torch.testing.assert_close(ours, theirs)
    assert rwkv.addcmul(x, delta, *weights[:5], None)[5] is None
    torch.testing.assert_close(rwkv.k_update(x, delta, weights[0]), k_update_ref(x, delta, weights[0]))
    arguments = (
        randn(2, 4, 6),
        randn(2, 4, 2, 3),
        randn(2, 4, 2, 3),
        randn(2, 3),
        randn(2, 4, 2, 3),
        randn(2, 4, 6),
    )
    torch.testing.assert_close(
        rwkv.gate_output_correction(*arguments), gate_output_correction_ref(*arguments)
    )
