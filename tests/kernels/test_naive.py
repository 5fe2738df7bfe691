"""Stand-ins for FLA's kernels of attention and slots equal formulas and other references in float64."""

import importlib

import pytest
import torch
import torch.nn.functional as F

from tests.support.gradient_comparison import same
from titanplans.kernels import KernelError
from titanplans.kernels.naive import Naive, by_naive

BATCH, TOKENS, HEADS, KEY, VALUE = 2, 9, 4, 4, 6
BOUNDS = torch.tensor([0, 4, 5, 9])
"""The boundaries of packed sequences, as `cu_seqlens`."""


pytestmark = pytest.mark.usefixtures("cpu_kernels")


def kernel(path):
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(f"fla.{module}"), name)


def rand(*sizes, seed=0):
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def qkv(heads_kv=2, batch=BATCH, tokens=TOKENS, value=VALUE):
    q, k = rand(batch, tokens, HEADS, KEY), rand(batch, tokens, heads_kv, KEY, seed=1)
    return [x.requires_grad_() for x in (q, k, rand(batch, tokens, heads_kv, value, seed=2))]


def close(got, want, tolerance=1e-12):
    """Check equality of float64 sums of some tens of terms of order 1."""
    assert got.dtype == want.dtype == torch.float64
    torch.testing.assert_close(got, want, rtol=0, atol=tolerance)


def softmax_attention(q, k, v, bias=None, window=None, visible=None):
    """Softmax attention of [B, T, H, D]; `bias` [B, H, T, T] is added to the scores."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5
    scores = scores if bias is None else scores + bias
    i, j = torch.arange(q.shape[1])[:, None], torch.arange(q.shape[1])
    mask = (j <= i) & (i - j < (window or len(j)))
    mask = mask if visible is None else mask & visible
    return torch.einsum("bhij,bjhd->bihd", scores.masked_fill(~mask, -torch.inf).softmax(-1), v)


def wall_attention(q, k, v, g, window=None, gate=None):
    past = g.cumsum(1)
    k = k.repeat_interleave(HEADS // k.shape[2], 2)
    decayed = (past[:, :, None] - past[:, None]).exp() * q[:, :, None] * k[:, None]
    bias = decayed.sum(-1).permute(0, 3, 1, 2) * KEY**-0.5
    if gate is not None:
        sums = gate.cumsum(1).transpose(1, 2)
        bias = bias + sums[..., None] - sums[..., None, :]
    return softmax_attention(q * 0, k, v, bias, window)


def forgetting(q, k, v, g, window=None):
    sums = g.cumsum(1).transpose(1, 2)
    return softmax_attention(q, k, v, sums[..., None] - sums[..., None, :], window)


def parallax(q, r, k, v, window=None):
    """Return softmax attention minus the covariance of values and second scores r k, weighted by attention."""
    k_all, v_all = (x.repeat_interleave(HEADS // x.shape[2], 2) for x in (k, v))
    ones = torch.eye(q.shape[1], dtype=q.dtype)[None, :, None].expand(len(q), -1, HEADS, -1)
    weights = softmax_attention(q, k, ones, window=window)  # [B, i, H, j]
    second = torch.einsum("bihd,bjhd->bihj", r, k_all)
    mean = (weights * second).sum(-1, keepdim=True)
    return torch.einsum("bihj,bjhd->bihd", weights * (1 + mean - second), v_all)


def stickbreaking(q, k, v, attend_current=False):
    k, v = (x.repeat_interleave(HEADS // x.shape[2], 2) for x in (k, v))
    beta = (torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5).sigmoid()
    outputs = []
    for i in range(q.shape[1]):
        remaining, o = torch.ones(len(q), HEADS, dtype=q.dtype), 0
        for j in range(i if attend_current else i - 1, -1, -1):
            o = o + (remaining * beta[:, :, i, j])[..., None] * v[:, j]
            remaining = remaining * (1 - beta[:, :, i, j])
        outputs.append(o + torch.zeros_like(v[:, 0]))
    return torch.stack(outputs, 1)


def block_attention(q, k, v, size, topk):
    """Compute MoBA query by query."""
    k, v = (x.repeat_interleave(HEADS // x.shape[2], 2) for x in (k, v))
    o = torch.zeros_like(q[..., :1] + v)
    for b, t, h in ((b, t, h) for b in range(len(q)) for t in range(q.shape[1]) for h in range(HEADS)):
        past = range(t // size)
        liking = [(q[b, t, h] @ k[b, c * size : (c + 1) * size, h].mean(0)).item() for c in past]
        best = sorted(past, key=lambda c: -liking[c])[: topk - 1]
        keys = [s for c in (*best, t // size) for s in range(c * size, min((c + 1) * size, t + 1))]
        weights = (k[b, keys, h] @ q[b, t, h] * KEY**-0.5).softmax(0)
        o[b, t, h] = weights @ v[b, keys, h]
    return o


GATE, CHANNELS = (
    F.logsigmoid(rand(BATCH, TOKENS, HEADS, seed=3)),
    F.logsigmoid(rand(BATCH, TOKENS, HEADS, KEY, seed=4)),
)
SECOND = rand(BATCH, TOKENS, HEADS, KEY, seed=5)

ATTENTION = {
    "plain": ("ops.attn.parallel:parallel_attn", softmax_attention, {}, {}),
    "window": ("ops.attn.parallel:parallel_attn", softmax_attention, {"window_size": 3}, {"window": 3}),
    "forgetting": ("ops.forgetting_attn.parallel:parallel_forgetting_attn", forgetting, {"g": GATE}, {"g": GATE}),
    "wall": (
        "ops.wall_attn.parallel:parallel_wall_attn",
        wall_attention,
        {"g": CHANNELS, "g_scalar": GATE, "window_size": 4},
        {"g": CHANNELS, "gate": GATE, "window": 4},
    ),
    "parallax": ("ops.parallax.parallel:parallel_parallax", parallax, {"r": SECOND}, {"r": SECOND}),
    "stick": ("ops.stickbreaking_attn.parallel:parallel_stickbreaking_attn", stickbreaking, {}, {}),
    "stick, current": (
        "ops.stickbreaking_attn.parallel:parallel_stickbreaking_attn",
        stickbreaking,
        {"attend_current": True},
        {"attend_current": True},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_equals_its_formula(name):
    """Full sequences are compared with gradients, and packed sequences with each sequence by itself."""
    path, formula, options, formula_options = ATTENTION[name]
    q, k, v = qkv(value=KEY)
    o = kernel(path)(q=q, k=k, v=v, **options)
    o = o[0] if isinstance(o, tuple) else o
    want = (
        formula(q, k, v, **formula_options)
        if "r" not in formula_options
        else formula(q, formula_options["r"], k, v)
    )
    tolerance = 1e-7 if name == "wall" else 1e-11  # FLA's log2(e) has eight digits
    same(o, want, (q, k, v), tolerance)

    def slice_of(x, at):
        return x[:1, at] if isinstance(x, torch.Tensor) else x

    first = {"q": q, "k": k, "v": v, **options}
    packed = kernel(path)(**{n: slice_of(x, slice(None)) for n, x in first.items()}, cu_seqlens=BOUNDS)
    packed = packed[0] if isinstance(packed, tuple) else packed
    for begin, end in zip(BOUNDS[:-1].tolist(), BOUNDS[1:].tolist(), strict=True):
        separate = kernel(path)(**{n: slice_of(x, slice(begin, end)) for n, x in first.items()})
        close(packed[:, begin:end], separate[0] if isinstance(separate, tuple) else separate)


@pytest.mark.parametrize("start", [None, torch.tensor([0, 3])])
@pytest.mark.parametrize("queries", [1, 3])
def test_the_last_queries_of_parallax(queries, start):
    q, k, v = qkv(value=KEY)
    decode = kernel("ops.parallax.decode:parallax_decode")
    o = decode(q[:, -queries:], SECOND[:, -queries:], k, v, window_size=5, cache_start=start)
    for b in range(BATCH):
        first = 0 if start is None else start[b]
        of_sequence = [x[b : b + 1, first:] for x in (q, SECOND, k, v)]
        close(o[b : b + 1], parallax(*of_sequence, window=5)[:, -queries:])


def test_the_last_query_of_forgetting_attention():
    q, k, v = (x[:1] for x in qkv(value=KEY))
    last = BOUNDS[1:] - 1
    o = kernel("ops.attn.decoding:attn_decoding_one_step")(q[:, last], k, v, GATE[:1], cu_seqlens=BOUNDS)
    full = kernel("ops.forgetting_attn.parallel:parallel_forgetting_attn")(
        q, k, v, GATE[:1], cu_seqlens=BOUNDS
    )
    close(o, full[:, last])


@pytest.mark.parametrize("window", [None, 4])
def test_the_last_queries_of_wall_attention(window):
    """The cache of keys is in float64, so that nothing is rounded."""
    q, k, v = qkv(value=KEY)
    to_log2 = 1.4426950216
    sums = CHANNELS.cumsum(1) * to_log2
    chunk, queries = 4, 3
    anchors = sums[:, ::chunk]
    keys = k.repeat_interleave(2, 2) * (anchors.repeat_interleave(chunk, 1)[:, :TOKENS] - sums).exp2()
    o, _ = kernel("ops.wall_attn.decode:parallel_wall_attn_decode")(
        q[:, -queries:],
        v,
        sums[:, -queries:],
        keys,
        anchors,
        None,
        KEY**-0.5,
        chunk,
        GATE.cumsum(1) * to_log2,
        window,
    )
    # FLA's constant is log2(e) to eight digits
    close(o, wall_attention(q, k, v, CHANNELS, window, GATE)[:, -queries:], 1e-7)


@pytest.mark.parametrize(("size", "topk"), [(3, 2), (2, 3), (4, 9)])
def test_block_attention_equals_its_formula(size, topk):
    q, k, v = qkv(heads_kv=HEADS)
    moba = kernel("ops.moba.parallel:parallel_moba")
    packed = [x.flatten(0, 1)[None] for x in (q, k, v)]
    o = moba(*packed, torch.tensor([0, TOKENS, 2 * TOKENS]), TOKENS, size, topk)
    close(o.unflatten(1, (BATCH, TOKENS))[0], block_attention(q, k, v, size, topk))


def test_one_block_is_plain_attention():
    q, k, v = qkv(heads_kv=HEADS, batch=1)
    o = kernel("ops.moba.parallel:parallel_moba")(q, k, v, torch.tensor([0, TOKENS]), TOKENS, 2, 1)
    close(o, softmax_attention(q, k, v))


def test_block_attention_with_shared_keys_is_refused_as_by_fla():
    with pytest.raises(KernelError, match="remove num_kv_heads"):
        kernel("ops.moba.parallel:parallel_moba")(*qkv(batch=1), torch.tensor([0, TOKENS]), TOKENS, 2, 1)


def test_deltaformer_equals_the_reference_of_fla():
    from fla.ops.deltaformer.naive import naive_deltaformer_attn

    from titanplans.kernels.widen import Widen

    q, k, v = qkv(heads_kv=HEADS, value=KEY)
    beta = rand(BATCH, TOKENS, HEADS, seed=6)
    attention = kernel("ops.deltaformer:deltaformer_attn")
    with Widen(torch.float64):
        want = naive_deltaformer_attn(q, k, v, beta)
    close(attention(q, k, v, beta), want)
    first_sequence = [x[:1] for x in (q, k, v, beta)]
    packed = attention(*first_sequence, cu_seqlens=BOUNDS)
    for begin, end in zip(BOUNDS[:-1].tolist(), BOUNDS[1:].tolist(), strict=True):
        close(packed[:, begin:end], attention(*(x[:, begin:end] for x in first_sequence)))


def test_sparse_attention_to_all_blocks_is_plain_attention():
    q, k, v = rand(1, TOKENS, 16, KEY), rand(1, TOKENS, 1, KEY, seed=1), rand(1, TOKENS, 1, KEY, seed=2)
    ones, zeros = torch.ones_like(q[..., 0]), torch.zeros_like(q[..., 0])
    options = dict(g_cmp=zeros, g_slc=ones, g_swa=zeros, block_counts=2, block_size=5, window_size=3)
    nsa = kernel("ops.nsa.parallel:parallel_nsa")
    o = nsa(q, k, v, **options)
    close(o, softmax_attention(q, k, v))
    last = {name: x[:, -2:] if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    close(nsa(q[:, -2:], k, v, **last), o[:, -2:])


@pytest.mark.parametrize(
    ("counts", "size", "remedy"),
    [
        (3, 16, "set 4 or 2"),
        (torch.tensor([[[3]]]), 16, "set 4 or 2"),
        (16, 16, "block_size = 16.* set 32 or more"),
    ],
)
def test_sparse_attention_is_refused_if_the_kernel_of_fla_uses_other_blocks(counts, size, remedy):
    q, k = rand(1, TOKENS, 16, KEY), rand(1, TOKENS, 1, KEY)
    ones = torch.ones_like(q[..., 0])
    options = dict(g_cmp=ones, g_slc=ones, g_swa=ones, block_counts=counts, block_size=size, window_size=3)
    with pytest.raises(KernelError, match=remedy):
        kernel("ops.nsa.parallel:parallel_nsa")(q, k, k, **options)


def test_slots_equal_the_formula_of_the_paper():
    """`naive_cumsum_abc` is the paper's formula. GSA with the paper's decays and inputs computes the same."""
    from fla.ops.abc.naive import naive_cumsum_abc

    from titanplans.kernels.widen import Widen

    q, k, v = qkv(heads_kv=HEADS)
    s = rand(BATCH, TOKENS, HEADS, 3, seed=7)
    with Widen(torch.float64):
        want, _ = naive_cumsum_abc(*(x.transpose(1, 2) for x in (q, k, v, s)))
    o, _ = kernel("ops.abc.chunk:chunk_abc")(q, k, v, s)
    close(o, want.transpose(1, 2))
    z = s.logcumsumexp(1)
    gates = {"s": (s - z).exp(), "g": torch.cat((z[:, :1], z[:, :-1]), 1) - z}
    for kind in ("chunk", "fused_recurrent"):
        gsa = kernel(f"ops.gsa:{kind}_gsa")
        close(gsa(q, k, v, **gates)[0], o)
        # In two segments; the second starts with the state of the first.
        begin, end = ([x[:, at] for x in (q, k, v, *gates.values())] for at in (slice(0, 5), slice(5, None)))
        first, state = gsa(*begin, output_final_state=True)
        second, _ = gsa(*end, initial_state=state)
        close(torch.cat((first, second), 1), o)


def test_lightnet_equals_its_formula():
    q, k, v = qkv(heads_kv=HEADS)
    weights = (k[:, None] - k.logcumsumexp(1)[:, :, None]).exp()  # [B, t, s, H, K]
    weights = weights * torch.ones(TOKENS, TOKENS).tril()[None, :, :, None, None]
    want = torch.einsum("bthk,btshk,bshv->bthv", q, weights, v) * KEY**-0.5
    for kind in ("chunk", "fused_recurrent"):
        light = kernel(f"ops.lightnet:{kind}_lightnet")
        close(light(q, k, v)[0], want)
        begin, end = ([x[:, at] for x in (q, k, v)] for at in (slice(0, 5), slice(5, None)))
        first, state = light(*begin, output_final_state=True, state_v_first=True)
        second, _ = light(*end, initial_state=state, state_v_first=True)
        close(torch.cat((first, second), 1), want)


@pytest.mark.parametrize("kind", ["chunk", "fused_chunk", "fused_recurrent"])
def test_linear_attention_equals_its_formula(kind):
    q, k, v = qkv(heads_kv=HEADS)
    scores = torch.einsum("bihk,bjhk->bhij", q, k).tril()
    want = torch.einsum("bhij,bjhv->bihv", scores, v) * KEY**-0.5
    linear = kernel(f"ops.linear_attn:{kind}_linear_attn")
    close(linear(q, k, v, normalize=False)[0], want)
    positive = q.exp(), k.exp()
    scores = torch.einsum("bihk,bjhk->bhij", *positive).tril()
    want = torch.einsum("bhij,bjhv->bihv", scores / scores.sum(-1, keepdim=True), v)
    o, _ = linear(*positive, v, normalize=True)
    same(o, want, (q, k, v), 1e-8)  # FLA adds 1e-10 to the denominator


@pytest.mark.parametrize("kind", ["chunk", "fused_chunk", "fused_recurrent", "parallel"])
def test_retention_decays_by_head_index(kind):
    q, k, v = qkv(heads_kv=HEADS)
    decays = torch.log1p(-(2.0 ** (-5.0 - torch.arange(HEADS, dtype=torch.float64))))
    distances = torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)
    scores = torch.einsum("bihk,bjhk->bhij", q, k) * (decays[:, None, None] * distances).exp()
    want = torch.einsum("bhij,bjhv->bihv", scores.tril(), v) * KEY**-0.5
    close(kernel(f"ops.retention:{kind}_retention")(q, k, v)[0], want, 1e-5)  # FLA's decays are float32


def test_bitlinear_equals_that_of_fla_in_torch():
    from fla.modules.fused_bitlinear import BitLinear, FusedBitLinear

    torch.manual_seed(0)
    fused, plain = FusedBitLinear(8, 6).double(), BitLinear(8, 6).double()
    plain.load_state_dict(fused.state_dict())
    x = rand(3, 8).requires_grad_()
    results = [
        [y, *torch.autograd.grad(y.cos().sum(), [x, m.weight, m.norm.weight])]
        for m in (fused, plain)
        for y in [m(x)]
    ]
    for got, want in zip(*results, strict=True):
        close(got, want)


@pytest.mark.parametrize("reverse", [False, True])
def test_sums_and_means_over_packed_sequences(reverse):
    x = rand(1, TOKENS, 2, 3)
    sums = kernel("ops.utils.cumsum:chunk_global_cumsum")(x, reverse=reverse, cu_seqlens=BOUNDS, scale=2.0)
    means = kernel("ops.utils.pooling:mean_pooling")(x, 3, BOUNDS)
    sequences = x.split(BOUNDS.diff().tolist(), 1)
    want = [sequence.flip(1).cumsum(1).flip(1) if reverse else sequence.cumsum(1) for sequence in sequences]
    close(sums, 2 * torch.cat(want, 1))
    close(means, torch.stack([chunk.mean(1) for sequence in sequences for chunk in sequence.split(3, 1)], 1))


def test_arguments_that_a_reference_lacks_are_refused():
    def parallel_attn(q, k, v, softcap=None):
        raise AssertionError

    computed = by_naive(parallel_attn, Naive("fla.ops.attn.naive:naive_parallel_attn"))
    with pytest.raises(KernelError, match=r"parallel_attn: softcap is not computed"):
        computed(*qkv(heads_kv=HEADS), softcap=30.0)
