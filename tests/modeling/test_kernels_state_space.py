"""Mamba 2 and 3 on a CPU: against loops over time, and against transformers' own forward in PyTorch."""

import pytest
import torch
from transformers import Mamba2Config
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

from titanplans.modeling.kernels import chunks, install, mamba3, state_space


def loop(x, dt, a, b, c, state):
    """The recurrence, token by token."""
    outputs = []
    for t in range(x.shape[1]):
        bt, ct = (y[:, t].repeat_interleave(x.shape[2] // y.shape[2], 1) for y in (b, c))
        new = (dt[:, t, :, None] * x[:, t])[..., None] * bt[:, :, None]
        state = (dt[:, t] * a).exp()[..., None, None] * state + new
        outputs.append((state * ct[:, :, None]).sum(-1))
    return torch.stack(outputs, 1), state


@pytest.mark.parametrize("length", [1, 7, 12])
def test_the_scan_is_the_recurrence(length, monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK_SIZE", 4)
    torch.manual_seed(length)
    heads, size, groups, states = 6, 3, 2, 5
    given = [
        torch.randn(2, length, heads, size, dtype=torch.float64),
        torch.rand(2, length, heads, dtype=torch.float64) * 3,
        -torch.rand(heads, dtype=torch.float64) * 4,
        *(torch.randn(2, length, groups, states, dtype=torch.float64) for _ in "bc"),
        torch.randn(2, heads, size, states, dtype=torch.float64),
    ]
    answers = []
    for function in (state_space.scan, loop):
        inputs = [x.clone().requires_grad_() for x in given]
        y, last = function(*inputs)
        (y.square().sum() + last.square().sum()).backward()
        answers.append([y, last, *(x.grad for x in inputs)])
    for ours, theirs in zip(*answers, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("groups", [1, 2])
def test_the_mixer_is_that_of_transformers(groups):
    """FLA's own forward gives other groups to the heads; one token after a cache goes on where the prefix ended."""
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
    for given in (None, mask):
        masked = x if given is None else x * given[..., None]
        ours = mixer(x, attention_mask=given)[0]
        torch.testing.assert_close(ours, theirs(masked, attention_mask=given).double(), rtol=2e-6, atol=2e-6)
    cache = Cache()
    whole = mixer(x)[0]
    mixer(x[:, :10], past_key_values=cache, use_cache=True)
    step = mixer(x[:, 10:], past_key_values=cache, use_cache=True)[0]
    torch.testing.assert_close(step, whole[:, 10:], rtol=1e-12, atol=1e-12)


def turned(x, angles):
    """x [B, H, R, N] with its first pairs turned as complex numbers by angles [B, H, A]."""
    size = 2 * angles.shape[-1]
    pairs = torch.view_as_complex(x[..., :size].unflatten(-1, (-1, 2)).contiguous())
    pairs = torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)[:, :, None])
    return torch.cat([pairs.flatten(-2), x[..., size:]], -1)


def mamba3_loop(q, k, v, adt, dt, trap, q_bias, k_bias, angles, d, mimo_v, mimo_o):
    """The recurrence of Mamba 3, token by token, with complex numbers for pairs; ranks side by side."""
    heads = v.shape[2]
    state = torch.zeros(len(v), heads, q.shape[-1], v.shape[-1], dtype=v.dtype)
    turn, before, outputs = torch.zeros_like(angles[:, 0]), None, []
    for t in range(v.shape[1]):
        turn = turn + dt[..., t, None] * angles[:, t]

        c, b = (
            turned(x[:, t].repeat_interleave(heads // x.shape[3], 2).transpose(1, 2) + bias, turn)
            for x, bias in ((q, q_bias), (k, k_bias))
        )
        x = v[:, t][:, :, None] * mimo_v
        new = torch.einsum("bhrn,bhrp->bhnp", b, x)
        decay, s = adt[..., t].exp()[..., None, None], trap[..., t].sigmoid()[..., None, None]
        step = dt[..., t][..., None, None]
        state = decay * state + step * s * new
        if before is not None:
            state = state + step * (1 - s) * decay * before
        before = new
        y = torch.einsum("bhrn,bhnp->bhrp", c, state) + d[:, None, None] * x
        outputs.append((y * mimo_o).sum(2))
    return torch.stack(outputs, 1)


def test_mamba3_is_its_recurrence():
    torch.manual_seed(0)
    length, heads, size, states, groups, mimo_rank = 7, 4, 3, 6, 2, 2

    def randn(*shape):
        return torch.randn(*shape, dtype=torch.float64)

    q, k = (randn(2, length, mimo_rank, groups, states) for _ in "qk")
    v, dt, trap = randn(2, length, heads, size), randn(2, heads, length).exp(), randn(2, heads, length)
    adt, angles = -dt * randn(2, heads, length).exp(), randn(2, length, heads, 2)
    q_bias, k_bias = (randn(heads, mimo_rank, states) for _ in "qk")
    d, mimo_v, mimo_o = randn(heads), *(randn(heads, mimo_rank, size) for _ in "vo")
    ours = mamba3.mimo(
        Q=q, K=k, V=v, ADT=adt, DT=dt, Trap=trap, Q_bias=q_bias, K_bias=k_bias, Angles=angles, D=d, Z=None,
        MIMO_V=mimo_v, MIMO_Out=mimo_o,
    )  # fmt: skip
    theirs = mamba3_loop(q, k, v, adt, dt, trap, q_bias, k_bias, angles, d, mimo_v, mimo_o)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["mamba3", "log_linear_mamba2"])
def test_what_fla_keeps_to_gpus_runs(name):
    """One token after a cache goes on where the prefix ended, padding is no token, and packed sequences are apart."""
    install("cpu")
    from fla.layers.log_linear_mamba2 import LogLinearMamba2
    from fla.layers.mamba3 import Mamba3
    from fla.models.utils import Cache

    torch.manual_seed(0)
    sizes = dict(head_dim=8, hidden_size=16, state_size=4, n_groups=2, layer_idx=0)
    mixer = Mamba3(**sizes) if name == "mamba3" else LogLinearMamba2(num_heads=4, **sizes)
    mixer = mixer.double()
    x, cache = torch.randn(2, 11, 16, dtype=torch.float64), Cache()
    whole = mixer(x)[0]
    mixer(x[:, :10], past_key_values=cache, use_cache=True)
    step = mixer(x[:, 10:], past_key_values=cache, use_cache=True)[0]
    torch.testing.assert_close(step, whole[:, 10:], rtol=1e-12, atol=1e-12)
    if name == "mamba3":
        mask = torch.ones(2, 11, dtype=torch.long)
        mask[1, :3] = 0
        padded = mixer(x, attention_mask=mask)[0]
        torch.testing.assert_close(padded[0], whole[0])
        torch.testing.assert_close(padded[1, 3:], mixer(x[1:, 3:])[0][0])
        both = torch.cat([x[:1, :4], x[1:, 3:]], 1)
        packed = mixer(both, cu_seqlens=torch.tensor([0, 4, 12]))[0]
        torch.testing.assert_close(packed[0, 4:], padded[1, 3:])
