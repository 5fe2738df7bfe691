"""Modules of FLA on a CPU, called through FLA's dispatch, equal their formulas in float64 and float32."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.support import process_groups
from tests.support.gradient_comparison import same
from titanplans.kernels import KernelError
from titanplans.kernels.layers.losses import cross_entropy_loss

TOLERANCE = {torch.float64: 1e-13, torch.float32: 2e-5}  # rounding of sums of up to some 100 terms of order 1


pytestmark = pytest.mark.usefixtures("cpu_kernels")


@pytest.fixture(params=[torch.float64, torch.float32], ids=["float64", "float32"])
def dtype(request):
    torch.manual_seed(0)
    return request.param


def randn(*shape, dtype):
    return torch.randn(*shape, dtype=dtype).requires_grad_()


def randomized(module, dtype):
    """Give a module random weights, so that the tests notice if one of them is not used."""
    for parameter in module.to(dtype).parameters():
        torch.nn.init.normal_(parameter)
    return module


def assert_same(got, want, leaves):
    """Check that outputs and gradients agree, with the tolerance for the dtype of the leaves."""
    same(got, want, leaves, TOLERANCE[leaves[0].dtype])


def rms(x, weight, eps=1e-5):
    y = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    return y if weight is None else y * weight


@pytest.mark.parametrize("affine", [True, False])
def test_rms_norm(dtype, affine):
    from fla.modules import RMSNorm

    norm, x = randomized(RMSNorm(12, elementwise_affine=affine), dtype), randn(2, 5, 12, dtype=dtype)
    assert_same(norm(x), rms(x, norm.weight), [x, norm.weight])


def test_rms_norm_adds_and_returns_the_residual(dtype):
    from fla.modules import RMSNorm

    norm = randomized(RMSNorm(12), dtype)
    x, residual = randn(2, 5, 12, dtype=dtype), randn(2, 5, 12, dtype=dtype)
    total = x + residual
    assert_same(norm(x, residual, True), (rms(total, norm.weight), total), [x, residual, norm.weight])


def test_layer_norm(dtype):
    from fla.modules import LayerNorm

    norm, x = randomized(LayerNorm(12, bias=True), dtype), randn(2, 5, 12, dtype=dtype)
    want = F.layer_norm(x, (12,), norm.weight, norm.bias, norm.eps)
    assert_same(norm(x), want, [x, norm.weight, norm.bias])


@pytest.mark.parametrize("is_rms_norm", [True, False])
def test_group_norm(dtype, is_rms_norm):
    from fla.modules import GroupNorm

    norm = randomized(GroupNorm(3, 12, bias=True, is_rms_norm=is_rms_norm), dtype)
    x = randn(2, 5, 12, dtype=dtype)
    groups = x.unflatten(-1, (3, 4))
    groups = groups if is_rms_norm else groups - groups.mean(-1, keepdim=True)
    want = rms(groups, None).flatten(-2) * norm.weight + norm.bias
    assert_same(norm(x), want, [x, norm.weight, norm.bias])


def test_norm_and_linear_in_one(dtype):
    from fla.modules import LayerNormLinear

    norm, x, weight = (
        randomized(LayerNormLinear(12), dtype),
        randn(2, 5, 12, dtype=dtype),
        randn(7, 12, dtype=dtype),
    )
    want = F.layer_norm(x, (12,), norm.weight, None, norm.eps) @ weight.T
    assert_same(norm(x, weight, None), want, [x, norm.weight, weight])


@pytest.mark.parametrize("activation", ["swish", "sigmoid"])
@pytest.mark.parametrize("is_rms_norm", [True, False])
def test_gated_norm(dtype, is_rms_norm, activation):
    from fla.modules import FusedLayerNormGated, FusedRMSNormGated

    norm = randomized(
        (FusedRMSNormGated if is_rms_norm else FusedLayerNormGated)(12, activation=activation), dtype
    )
    x, g = randn(2, 5, 3, 12, dtype=dtype), randn(2, 5, 3, 12, dtype=dtype)
    normed = rms(x, norm.weight) if is_rms_norm else F.layer_norm(x, (12,), norm.weight, None, norm.eps)
    want = normed * (F.silu(g) if activation == "swish" else g.sigmoid())
    assert_same(norm(x, g), want, [x, g, norm.weight])


def test_gated_norm_and_linear_in_one(dtype):
    from fla.modules import FusedRMSNormSwishGateLinear

    norm = randomized(FusedRMSNormSwishGateLinear(12), dtype)
    x, g, weight = randn(2, 5, 12, dtype=dtype), randn(2, 5, 12, dtype=dtype), randn(7, 12, dtype=dtype)
    want = (rms(x, norm.weight) * F.silu(g)) @ weight.T
    assert_same(norm(x, g, weight), want, [x, g, norm.weight, weight])


def test_l2_norm(dtype):
    from fla.modules import L2Norm

    x = randn(2, 5, 12, dtype=dtype)
    assert_same(L2Norm()(x), x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt(), [x])


@pytest.mark.parametrize(
    ("name", "formula"),
    [
        ("sigmoid", torch.sigmoid),
        ("swish", F.silu),
        ("logsigmoid", F.logsigmoid),
        ("gelu", lambda x: F.gelu(x, approximate="tanh")),
        ("sqrelu", lambda x: F.relu(x).square()),
    ],
)
def test_activations(dtype, name, formula):
    from fla.modules.activations import ACT2FN

    x = randn(2, 5, 12, dtype=dtype)
    assert_same(ACT2FN[name](x), formula(x), [x])


def test_bias_gelu(dtype):
    from fla.modules.activations import ACT2FN

    x, bias = randn(5, 12, dtype=dtype), randn(12, dtype=dtype)
    assert_same(ACT2FN["bias_gelu"](x, bias), F.gelu(x + bias, approximate="tanh"), [x, bias])


def power_gate(x, power):
    positive = x.clamp_min(1e-30)
    return torch.where(x > 0, positive ** (power / (positive.sqrt() + 1)), x) * x.sigmoid()


@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize("kind", ["swiglu", "powglu"])
def test_gated_linear_units(dtype, kind, linear):
    from fla.modules import activations

    x, y, weight = randn(2, 5, 12, dtype=dtype), randn(2, 5, 12, dtype=dtype), randn(7, 12, dtype=dtype)
    want = (F.silu(x) if kind == "swiglu" else power_gate(x, 3.0)) * y
    if linear:
        got = getattr(activations, f"{kind}_linear")(x, y, weight, None)
        assert_same(got, want @ weight.T, [x, y, weight])
    else:
        assert_same(getattr(activations, kind)(x, y), want, [x, y])


def convolve(x, weight, bias, history):
    """Loop over channels and taps: y[t] = sum_w weight[w] x[t - W + 1 + w], for x [T, D] after a history [W, D]."""
    width = weight.shape[1]
    padded = torch.cat([history, x])
    taps = [padded[w + 1 : w + 1 + x.shape[0]] * weight[:, w] for w in range(width)]
    return F.silu(sum(taps) + bias), padded[-width:].T


@pytest.mark.parametrize("with_cache", [False, True])
@pytest.mark.parametrize("lengths", [[9], [2, 1, 6], [3, 0, 6]], ids=str)
def test_short_convolution_of_packed_sequences(dtype, lengths, with_cache):
    from fla.modules import ShortConvolution

    conv = randomized(ShortConvolution(6, 4, bias=True), dtype)
    x, cache = randn(1, sum(lengths), 6, dtype=dtype), randn(len(lengths), 6, 4, dtype=dtype)
    boundaries = torch.tensor([0, *lengths]).cumsum(0) if len(lengths) > 1 else None
    histories = cache if with_cache else torch.zeros_like(cache)
    sequences = [
        convolve(tokens, conv.weight.squeeze(1), conv.bias, history.T)
        for tokens, history in zip(x[0].split(lengths), histories, strict=True)
    ]
    want = torch.cat([y for y, _ in sequences])[None], torch.stack([state for _, state in sequences])
    got = conv(x, cache=cache if with_cache else None, output_final_state=True, cu_seqlens=boundaries)
    assert_same(got, want, [x, conv.weight, conv.bias, cache if with_cache else None])


def test_short_convolution_of_a_batch_with_residual(dtype):
    from fla.modules.causal_conv1d import causal_conv1d

    x, residual, weight = randn(2, 9, 6, dtype=dtype), randn(2, 9, 6, dtype=dtype), randn(6, 3, dtype=dtype)
    got, state = causal_conv1d(x, weight, residual=residual, activation="silu")
    bias, history = torch.zeros(6, dtype=dtype), torch.zeros(3, 6, dtype=dtype)
    want = torch.stack([convolve(sequence, weight, bias, history)[0] for sequence in x]) + residual
    assert state is None
    assert_same(got, want, [x, residual, weight])


def test_short_convolution_token_by_token(dtype):
    from fla.modules import ShortConvolution

    conv, x = randomized(ShortConvolution(6, 4), dtype), torch.randn(2, 9, 6, dtype=dtype)
    full, final = conv(x, output_final_state=True)
    cache, steps = None, []
    with torch.no_grad():
        for t in range(x.shape[1]):
            y, cache = conv(x[:, t : t + 1], cache=cache, output_final_state=True)
            steps.append(y)
    torch.testing.assert_close(torch.cat(steps, 1), full, rtol=0, atol=TOLERANCE[dtype])
    torch.testing.assert_close(cache, final, rtol=0, atol=0)


def rotate(x, positions, interleaved):
    """Rotate channel pairs of x [T, H, D], as complex numbers, by position * 10000^(-2i/D)."""
    pairs = x.unflatten(-1, (-1, 2)) if interleaved else x.unflatten(-1, (2, -1)).transpose(-1, -2)
    frequencies = 1.0 / 10000 ** (torch.arange(0, x.shape[-1], 2, dtype=torch.float32) / x.shape[-1])
    angle = torch.outer(positions.float(), frequencies)  # in float32, as FLA computes its tables
    turned = (
        torch.view_as_complex(pairs.contiguous())
        * torch.complex(angle.cos().to(x), angle.sin().to(x))[:, None]
    )
    turned = torch.view_as_real(turned)
    return turned.flatten(-2) if interleaved else turned.transpose(-1, -2).flatten(-2)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("case", ["batch", "offset", "offsets", "packed"])
def test_rotary(dtype, case, interleaved):
    from fla.modules import RotaryEmbedding

    rotary = RotaryEmbedding(8, interleaved=interleaved)
    batch = 1 if case == "packed" else 2
    q, k = randn(batch, 9, 3, 8, dtype=dtype), randn(batch, 9, 1, 8, dtype=dtype)
    steps = torch.arange(9)
    options, positions = {
        "batch": ({}, [steps, steps]),
        "offset": (dict(seqlen_offset=4), [steps + 4, steps + 4]),
        "offsets": (dict(seqlen_offset=torch.tensor([4, 0]), max_seqlen=16), [steps + 4, steps]),
        "packed": (dict(cu_seqlens=torch.tensor([0, 5, 9])), [torch.cat([steps[:5], steps[:4]])]),
    }[case]
    want = tuple(
        torch.stack([rotate(sequence, p, interleaved) for sequence, p in zip(x, positions, strict=True)])
        for x in (q, k)
    )
    assert_same(rotary(q, k, **options), want, [q, k])


def test_rotary_left_padding_is_zero():
    from fla.modules import RotaryEmbedding

    q = torch.ones(2, 4, 1, 8)
    turned, _ = RotaryEmbedding(8)(q, q, seqlen_offset=torch.tensor([-2, 0]), max_seqlen=4)
    assert not turned[0, :2].any()
    torch.testing.assert_close(turned[0, 2:], turned[1, :2])


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy(dtype, reduction):
    from fla.modules import FusedCrossEntropyLoss

    logits, target = randn(6, 11, dtype=dtype), torch.tensor([3, 0, -100, 10, 5, 5])
    got = FusedCrossEntropyLoss(reduction=reduction, label_smoothing=0.1, lse_square_scale=0.01)(
        logits, target
    )
    keep = target != -100
    z_loss = 0.01 * logits.logsumexp(-1).square() * keep
    want = F.cross_entropy(logits, target, reduction="none", label_smoothing=0.1) + z_loss
    want = {"none": want, "sum": want.sum(), "mean": want.sum() / keep.sum()}[reduction]
    assert_same(got, want, [logits])


def test_linear_cross_entropy(dtype):
    from fla.modules import FusedLinearCrossEntropyLoss

    x, weight, target = (
        randn(2, 3, 8, dtype=dtype),
        randn(11, 8, dtype=dtype),
        torch.tensor([[3, 0, -100], [10, 5, 5]]),
    )
    got = FusedLinearCrossEntropyLoss(logit_softcapping=5.0)(x, target, weight)
    want = F.cross_entropy((5 * torch.tanh(x @ weight.T / 5)).flatten(0, 1), target.flatten())
    assert_same(got, want, [x, weight])


def test_a_sharded_vocabulary_is_refused():
    logits, target = torch.zeros(2, 3), torch.zeros(2, dtype=torch.long)
    with process_groups.fake_group(2), pytest.raises(KernelError, match="process_group"):
        cross_entropy_loss(logits, target, process_group=dist.group.WORLD)


def test_attention_residuals(dtype):
    from fla.ops.attnres import fused_attnres

    sources, query = [randn(2, 5, 8, dtype=dtype) for _ in range(3)], randn(1, 8, dtype=dtype)
    weight, out_weight = randn(8, dtype=dtype), randn(8, dtype=dtype)
    stacked = torch.stack(sources)
    mix = ((rms(stacked, weight, 1e-6) * query).sum(-1).softmax(0)[..., None] * stacked).sum(0)
    got = fused_attnres(query, sources, weight, out_weight)
    assert_same(got, rms(mix, out_weight, 1e-6), [*sources, query, weight, out_weight])
