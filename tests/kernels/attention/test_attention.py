"""The stand-ins for flash-attn equal an explicit masked softmax."""

import pytest
import torch

from tests.support.gradient_comparison import same
from titanplans.kernels import KernelError
from titanplans.kernels.attention.attention import flash_attn_func, flash_attn_varlen_func


def masked_softmax(q, k, v, causal, window, scale=None):
    """Compute attention of q, k and v [B, L, H, D]. As in flash-attn, the output of queries without keys is zero."""
    groups = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(groups, 2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    visible = torch.ones(scores.shape[-2:], dtype=torch.bool)
    for i in range(q.shape[1]):
        position = i + k.shape[1] - q.shape[1]
        for j in range(k.shape[1]):
            visible[i, j] = (
                (not causal or j <= position)
                and (window[0] < 0 or j >= position - window[0])
                and (window[1] < 0 or j <= position + window[1])
            )
    weights = torch.softmax(scores.masked_fill(~visible, -torch.inf), -1).masked_fill(
        ~visible.any(-1, keepdim=True), 0
    )
    return torch.einsum("bhij,bjhd->bihd", weights, v)


def tensors(num_queries, num_keys, heads=4, kv_heads=4, batch=2):
    torch.manual_seed(0)
    shapes = [(batch, num_queries, heads, 8), (batch, num_keys, kv_heads, 8), (batch, num_keys, kv_heads, 8)]
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("window", [(-1, -1), (3, 0), (0, 0), (2, 4), (-1, 2)])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("lengths", [(12, 12), (5, 12), (1, 12)], ids=str)
def test_attention_equals_a_masked_softmax(lengths, causal, window, kv_heads):
    leaves = tensors(*lengths, kv_heads=kv_heads)
    got = flash_attn_func(*leaves, causal=causal, window_size=window, softmax_scale=0.2)
    same(got, masked_softmax(*leaves, causal, window, 0.2), leaves)


def test_queries_before_the_first_key_get_zeros():
    leaves = tensors(6, 4)
    o = flash_attn_func(*leaves, causal=True)
    assert not o[:, :2].any()
    torch.testing.assert_close(o, masked_softmax(*leaves, True, (-1, -1)), rtol=0, atol=1e-13)
    assert all(x.isfinite().all() for x in torch.autograd.grad(o.square().sum(), leaves))


@pytest.mark.parametrize("window", [(-1, -1), (2, 0)])
def test_packed_sequences_are_separate(window):
    bounds_q, bounds_k = torch.tensor([0, 3, 4, 10]), torch.tensor([0, 5, 6, 12])
    q, k, v = leaves = [x.detach()[0].requires_grad_() for x in tensors(10, 12, kv_heads=2)]
    got = flash_attn_varlen_func(
        q, k, v, bounds_q, bounds_k, max_seqlen_q=6, max_seqlen_k=6, causal=True, window_size=window
    )
    separate = [
        masked_softmax(q[None, a:b], k[None, c:d], v[None, c:d], True, window)[0]
        for a, b, c, d in zip(
            bounds_q[:-1].tolist(),
            bounds_q[1:].tolist(),
            bounds_k[:-1].tolist(),
            bounds_k[1:].tolist(),
            strict=True,
        )
    ]
    same(got, torch.cat(separate), leaves)


def test_one_graph_under_compile():
    leaves = tensors(12, 12, kv_heads=2)
    function = torch.compile(
        lambda *x: flash_attn_func(*x, causal=True, window_size=(3, 0)), fullgraph=True, backend="aot_eager"
    )
    torch.testing.assert_close(function(*leaves), masked_softmax(*leaves, True, (3, 0)), rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    ("message", "kv_heads", "option"),
    [
        ("softcap", 4, dict(softcap=30.0)),
        ("alibi_slopes", 4, dict(alibi_slopes=torch.ones(4))),
        ("return_attn_probs", 4, dict(return_attn_probs=True)),
        ("4 query heads are not a multiple of 3 key heads", 3, {}),
    ],
)
def test_options_without_an_operator_in_torch_are_refused(message, kv_heads, option):
    with pytest.raises(KernelError, match=message):
        flash_attn_func(*tensors(4, 4, kv_heads=kv_heads), **option)


def test_paged_keys_are_refused():
    q, k, v = (x[0] for x in tensors(4, 4))
    bounds = torch.tensor([0, 4])
    with pytest.raises(KernelError, match="block_table"):
        flash_attn_varlen_func(q, k, v, bounds, bounds, 4, 4, block_table=torch.zeros(1, 1))
