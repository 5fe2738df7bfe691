"""The GPU code paths of Mamba and Mamba 2, run on a CPU with the kernels of mamba_ssm rewritten in PyTorch.

In training these code paths call one kernel for the full mixer. Ranks can't sum inside it, so a split model calls separate
kernels.
"""

import pytest
import torch
import torch.nn.functional as F

from tests import zoo
from tests.support.plain_proofs import verify_plain
from titanplans import kernels, modeling
from titanplans.kernels.recurrent import state_space
from titanplans.modeling.samples import build_real, sample_inputs


def selective_scan(u, delta, a, b, c, d, z, delta_bias=None, delta_softplus=False, return_last_state=False):
    """Scan u, delta and z [B, D, T], with a [D, N], b and c [B, N, T], d and delta_bias [D]."""
    delta = F.softplus(delta + delta_bias[:, None])
    state, outputs = u.new_zeros(*u.shape[:2], a.shape[1]), []
    for t in range(u.shape[2]):
        new = (delta[..., t] * u[..., t])[..., None] * b[:, None, :, t]
        state = (delta[..., t, None] * a).exp() * state + new
        outputs.append((state * c[:, None, :, t]).sum(-1))
    y = (torch.stack(outputs, -1) + u * d[:, None]) * F.silu(z)
    return (y, state) if return_last_state else y


def convolved(x, weight, bias):
    """Return the causal convolution of x [B, D, T] with weight [D, 1, W], after SiLU."""
    return F.silu(
        F.conv1d(x, weight, bias, padding=weight.shape[2] - 1, groups=len(weight))[..., : x.shape[2]]
    )


def mamba_inner(
    xz,
    conv_weight,
    conv_bias,
    x_weight,
    dt_weight,
    out_weight,
    out_bias,
    a,
    b,
    c,
    d,
    delta_bias,
    delta_softplus,
):
    """Compute the mixer after its first projection, from xz [B, 2 D, T]."""
    x, z = xz.chunk(2, 1)
    x = convolved(x, conv_weight, conv_bias)
    states = a.shape[1]
    dt, b, c = F.linear(x.transpose(1, 2), x_weight).split([dt_weight.shape[1], states, states], -1)
    delta = dt_weight @ dt.transpose(1, 2)
    y = selective_scan(x, delta, a, b.transpose(1, 2), c.transpose(1, 2), d, z, delta_bias)
    return F.linear(y.transpose(1, 2), out_weight, out_bias)


def chunk_scan(
    x, dt, a, b, c, chunk_size, D, z, seq_idx, return_final_states, dt_bias, dt_softplus, dt_limit=(0, None)
):
    """Scan x and z [B, T, H, P], with dt [B, T, H], b and c [B, T, G, N]."""
    y, state = state_space.scan(x, F.softplus(dt + dt_bias).clamp(*dt_limit), a, b, c)
    y = y + x * (D[:, None] if D.ndim == 1 else D)
    return (y if z is None else y * F.silu(z)), state


def split_conv1d_scan(
    zxbcdt,
    conv_weight,
    conv_bias,
    dt_bias,
    a,
    D,
    chunk_size,
    seq_idx,
    activation,
    rmsnorm_weight,
    rmsnorm_eps,
    outproj_weight,
    outproj_bias,
    headdim,
    ngroups,
    norm_before_gate,
    return_final_states,
    **limit,
):
    """Compute the mixer after its first projection, from the product [B, T, 2 H P + 2 G N + H]."""
    heads = len(a)
    width = heads * (D.shape[1] if headdim is None else headdim)
    group = (zxbcdt.shape[-1] - 2 * width - heads) // 2
    z, xbc, dt = zxbcdt.split([width, width + 2 * group, heads], -1)
    x, b, c = (
        convolved(xbc.transpose(1, 2), conv_weight[:, None], conv_bias)
        .transpose(1, 2)
        .split([width, group, group], -1)
    )
    x, b, c = x.unflatten(-1, (heads, -1)), b.unflatten(-1, (ngroups, -1)), c.unflatten(-1, (ngroups, -1))
    y = chunk_scan(x, dt, a, b, c, chunk_size, D, None, None, False, dt_bias, True, **limit)[0].flatten(2)
    gate = F.silu(z)
    if rmsnorm_weight is None:
        y = y * gate
    else:
        y = (y if norm_before_gate else y * gate).unflatten(-1, (ngroups, -1))
        y = F.rms_norm(y, y.shape[-1:], None, rmsnorm_eps).flatten(-2) * rmsnorm_weight
        y = y * gate if norm_before_gate else y
    return F.linear(y, outproj_weight, outproj_bias)


PATHS = {
    "mamba": ("mamba_inner_fn", mamba_inner, {"selective_scan_fn": selective_scan}),
    "mamba2": (
        "mamba_split_conv1d_scan_combined",
        split_conv1d_scan,
        {"mamba_chunk_scan_combined": chunk_scan},
    ),
}


@pytest.mark.parametrize(("name", "variant"), [("mamba", 0), ("mamba", 1), ("mamba2", 1), ("mamba2", 3)])
def test_the_split_model_calls_separate_kernels(name, variant, monkeypatch):
    kernels.install("cpu")
    import fla.layers.mamba
    import fla.layers.mamba2

    module = getattr(fla.layers, name)
    mixer, slow = {
        "mamba": (fla.layers.mamba.Mamba, "slow_forward"),
        "mamba2": (fla.layers.mamba2.Mamba2, "torch_forward"),
    }[name]
    fused_name, fused, replacements = PATHS[name]
    called = []

    def counted(*args, **kwargs):
        called.append(fused_name)
        return fused(*args, **kwargs)

    monkeypatch.setattr(module, fused_name, counted)
    for kernel, function in replacements.items():
        monkeypatch.setattr(module, kernel, function)
    monkeypatch.setattr(mixer, slow, mixer.cuda_kernels_forward)
    config = modeling.load_config(name, "debug", **zoo.FAMILIES[name][variant])
    inputs = sample_inputs(config, batch_size=2, seq_len=16, seed=0)
    report = verify_plain(
        lambda: build_real(config), inputs=inputs, degrees=[2, 4], loss_parallel=True, sequence_parallel=True
    )
    assert report.passed, report.table()
    assert called, "the unsplit model calls the fused kernel"
