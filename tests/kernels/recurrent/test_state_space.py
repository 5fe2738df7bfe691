"""Mamba 2 and 3 on a CPU equal loops over time and transformers' forward in PyTorch."""

import pytest
import torch
from transformers import Mamba2Config
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

from tests.support.gradient_comparison import same
from titanplans.kernels import install
from titanplans.kernels.recurrent import chunks, log_linear, mamba3, state_space


def loop(x, dt, a, b, c, state):
    """Compute the recurrence token by token."""
    outputs = []
    for t in range(x.shape[1]):
        bt, ct = (y[:, t].repeat_interleave(x.shape[2] // y.shape[2], 1) for y in (b, c))
        new = (dt[:, t, :, None] * x[:, t])[..., None] * bt[:, :, None]
        state = (dt[:, t] * a).exp()[..., None, None] * state + new
        outputs.append((state * ct[:, :, None]).sum(-1))
    return torch.stack(outputs, 1), state


@pytest.mark.parametrize("length", [1, 7, 12])
def test_the_scan_equals_the_recurrence(length, monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK_SIZE", 4)
    torch.manual_seed(length)
    heads, size, groups, states = 6, 3, 2, 5
    arguments = [
        torch.randn(2, length, heads, size, dtype=torch.float64),
        torch.rand(2, length, heads, dtype=torch.float64) * 3,
        -torch.rand(heads, dtype=torch.float64) * 4,
        *(torch.randn(2, length, groups, states, dtype=torch.float64) for _ in "bc"),
        torch.randn(2, heads, size, states, dtype=torch.float64),
    ]
    leaves = [x.requires_grad_() for x in arguments]
    same(state_space.scan(*leaves), loop(*leaves), leaves)


@pytest.mark.parametrize("groups", [1, 2])
def test_the_mixer_equals_that_of_transformers(groups):
    """transformers is the reference, because FLA's own forward assigns the groups to other heads. The cache then
    continues."""
    install("cpu")
    from fla.layers.mamba2 import Mamba2
    from fla.models.utils import Cache

    torch.manual_seed(0)
    mixer = Mamba2(head_dim=8, hidden_size=16, state_size=4, n_groups=groups, chunk_size=8, layer_idx=0)
    mixer = mixer.double()
    theirs = Mamba2Mixer(
        Mamba2Config(
            hidden_size=16,
            num_heads=4,
            head_dim=8,
            state_size=4,
            n_groups=groups,
            chunk_size=8,
            use_bias=False,
        ),
        layer_idx=0,
    )
    theirs.double().load_state_dict(mixer.state_dict())
    x = torch.randn(2, 11, 16, dtype=torch.float64)
    mask = torch.ones(2, 11, dtype=torch.long)
    mask[1, :3] = 0
    for attention_mask in (None, mask):
        masked = x if attention_mask is None else x * attention_mask[..., None]
        ours = mixer(x, attention_mask=attention_mask)[0]
        torch.testing.assert_close(
            ours, theirs(masked, attention_mask=attention_mask).double(), rtol=2e-6, atol=2e-6
        )
    cache = Cache()
    full = mixer(x)[0]
    mixer(x[:, :10], past_key_values=cache, use_cache=True)
    step = mixer(x[:, 10:], past_key_values=cache, use_cache=True)[0]
    torch.testing.assert_close(step, full[:, 10:], rtol=1e-12, atol=1e-12)


def mamba3_directly(q, k, v, adt, dt, trap, q_bias, k_bias, angles, d, z, mimo_v, mimo_z, pairs):
    """Return [B, T, H, R, P]: attention with decays, in the quadratic form of mamba_ssm's tests (mamba3_siso_fwd_ref).

    A token writes with its own half step and with the half step of the next token. Its own output uses only its own half
    step. Queries and keys are rotated as complex numbers, whose components are at the indices `pairs`.
    """
    tokens, heads = v.shape[1:3]
    q, k = (
        x.repeat_interleave(heads // x.shape[3], 3) + bias.transpose(0, 1)
        for x, bias in ((q, q_bias), (k, k_bias))
    )
    x, gate = (torch.einsum("bthp,hrp->bthrp", *both) for both in ((v, mimo_v), (z, mimo_z)))
    turns = (torch.pi * torch.tanh(angles) * dt.mT[..., None]).cumsum(1)
    turns = torch.nn.functional.pad(turns, (0, len(pairs[0]) - turns.shape[-1]))
    between = torch.polar(torch.ones(()).double(), turns[:, None] - turns[:, :, None])  # [B, t, s, H, N / 2]
    of_q, of_k = (torch.complex(y[..., pairs[0]], y[..., pairs[1]]) for y in (q, k))
    scores = torch.einsum("btihn,bsjhn,btshn->bhtisj", of_q.conj(), of_k, between).real
    own_step = dt * trap.sigmoid()
    following = torch.nn.functional.pad((dt * (1 - trap.sigmoid()))[..., 1:], (0, 1))
    weights = torch.zeros(len(v), heads, tokens, tokens, dtype=v.dtype)
    for t in range(tokens):
        for s in range(t + 1):
            written = own_step[..., s] + (following[..., s] if s < t else 0)
            weights[:, :, t, s] = written * adt[..., s + 1 : t + 1].sum(-1).exp()
    y = torch.einsum("bhtisj,bhts,bshjp->bthip", scores, weights, x) + d[:, None, None] * x
    return y * gate * gate.sigmoid()


@pytest.mark.parametrize(("mimo_rank", "angle_pairs"), [(1, 3), (1, 2), (2, 3), (2, 2)])
def test_mamba3_equals_its_quadratic_form(mimo_rank, angle_pairs):
    torch.manual_seed(0)
    length, heads, size, states, groups = 7, 4, 3, 6, 2

    def randn(*shape):
        return torch.randn(*shape, dtype=torch.float64)

    q, k = (randn(2, length, mimo_rank, groups, states) for _ in "qk")
    v, z, dt = randn(2, length, heads, size), randn(2, length, heads, size), randn(2, heads, length).exp()
    adt, angles = -dt * randn(2, heads, length).exp(), randn(2, length, heads, angle_pairs)
    q_bias, k_bias = (randn(heads, mimo_rank, states) for _ in "qk")
    arguments = [q, k, v, adt, dt, randn(2, heads, length), q_bias, k_bias, angles, randn(heads), z]
    names = ["Q", "K", "V", "ADT", "DT", "Trap", "Q_bias", "K_bias", "Angles", "D", "Z"]

    def ours(*tensors):
        named = dict(zip(names, tensors, strict=False))
        if mimo_rank > 1:
            return mamba3.mimo(**named, MIMO_V=tensors[11], MIMO_Z=tensors[12])
        named |= {name: named[name].squeeze(2) for name in "QK"} | {
            name: named[name].squeeze(1) for name in ("Q_bias", "K_bias")
        }
        return mamba3.siso(**named)[:, :, None]

    half = torch.arange(states // 2)
    pairs = (2 * half, 2 * half + 1) if mimo_rank == 1 else (half, half + states // 2)
    projections = (
        [torch.ones(heads, 1, size).double()] * 2 if mimo_rank == 1 else [randn(heads, 2, size) for _ in "vz"]
    )
    leaves = [x.requires_grad_() for x in arguments]
    want = mamba3_directly(*leaves, *projections, pairs).transpose(2, 3)
    same(ours(*leaves, *projections), want, leaves, 1e-11)


@pytest.mark.parametrize("name", ["mamba3", "log_linear_mamba2"])
def test_mixers_that_fla_restricts_to_gpus_run(name):
    """The prefix continues with one token and its cache, padding is ignored, and packed sequences are separate."""
    install("cpu")
    from fla.layers.log_linear_mamba2 import LogLinearMamba2
    from fla.layers.mamba3 import Mamba3
    from fla.models.utils import Cache

    torch.manual_seed(0)
    sizes = dict(head_dim=8, hidden_size=16, state_size=4, n_groups=2, layer_idx=0)
    mixer = Mamba3(**sizes) if name == "mamba3" else LogLinearMamba2(num_heads=4, **sizes)
    mixer = mixer.double()
    x, cache = torch.randn(2, 11, 16, dtype=torch.float64), Cache()
    full = mixer(x)[0]
    mixer(x[:, :10], past_key_values=cache, use_cache=True)
    step = mixer(x[:, 10:], past_key_values=cache, use_cache=True)[0]
    torch.testing.assert_close(step, full[:, 10:], rtol=1e-12, atol=1e-12)
    if name == "mamba3":
        mask = torch.ones(2, 11, dtype=torch.long)
        mask[1, :3] = 0
        padded = mixer(x, attention_mask=mask)[0]
        torch.testing.assert_close(padded[0], full[0])
        torch.testing.assert_close(padded[1, 3:], mixer(x[1:, 3:])[0][0])
        both = torch.cat([x[:1, :4], x[1:, 3:]], 1)
        packed = mixer(both, cu_seqlens=torch.tensor([0, 4, 12]))[0]
        torch.testing.assert_close(packed[0, 4:], padded[1, 3:])


def test_log_linear_attention_equals_the_reference_of_fla():
    from fla.ops.log_linear_attn.naive import naive_log_linear_attn

    torch.manual_seed(0)
    q, k = (torch.randn(2, 13, 2, 3, dtype=torch.float64) for _ in "qk")
    v, scales = torch.randn(2, 13, 4, 5, dtype=torch.float64), torch.randn(2, 13, 4, 6, dtype=torch.float64)
    g = -torch.rand(2, 13, 4, dtype=torch.float64)
    leaves = [x.requires_grad_() for x in (q, k, v, g, scales)]
    ours, _ = log_linear.chunk_log_linear_attn(*leaves, scale=None)
    same(ours, naive_log_linear_attn(*leaves, scale=None), leaves)
