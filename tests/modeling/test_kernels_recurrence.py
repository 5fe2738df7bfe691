"""FLA's own references behind the names of its kernels: what the adapter adds to them, and what it refuses."""

import importlib

import pytest
import torch
import torch.nn.functional as F

from titanplans.modeling.kernels import KernelError, install
from titanplans.modeling.kernels.table import _NAIVE

BATCH, TOKENS, HEADS, KEY, VALUE = 2, 7, 2, 4, 6
GATES = {"delta_rule": None, "simple_gla": (), "gated_delta_rule": (), "kda": (KEY,)}
"""Dimensions of a gate beyond [B, T, H]; None: no gate."""


@pytest.fixture(autouse=True, scope="module")
def _installed():
    install("cpu")


@pytest.fixture(params=_NAIVE)
def mixer(request):
    return request.param


def kernel(mixer, kind="chunk"):
    return getattr(importlib.import_module(f"fla.ops.{mixer}"), f"{kind}_{mixer}")


def inputs(mixer, batch=BATCH, tokens=TOKENS, dtype=torch.float64):
    rng = torch.Generator().manual_seed(0)

    def randn(*sizes):
        return torch.randn(batch, tokens, HEADS, *sizes, generator=rng, dtype=torch.float64)

    given = {"q": randn(KEY), "k": F.normalize(randn(KEY), dim=-1), "v": randn(VALUE)}
    if (sizes := GATES[mixer]) is not None:
        given["g"] = F.logsigmoid(randn(*sizes))
    if mixer != "simple_gla":
        given["beta"] = randn().sigmoid()
    return {name: x.to(dtype).requires_grad_() for name, x in given.items()}


def close(got, want, tolerance=1e-13):
    """Of float64 sums of some tens of terms of order 1."""
    assert got.dtype == want.dtype
    assert (got - want).abs().max() <= tolerance * max(1.0, want.abs().max().item())


def by_hand(mixer, q, k, v, g=None, beta=None):
    """S_t = decay(g_t) S_{t-1} + k_t (beta_t (v_t - S^T k_t))^T, o_t = K^-0.5 S_t^T q_t; simple_gla has no delta."""
    state, outputs = q.new_zeros(q.shape[0], HEADS, KEY, VALUE), []
    for t in range(q.shape[1]):
        if g is not None:
            gate = g[:, t].exp()
            state = state * (gate[..., None] if gate.dim() == 3 else gate[..., None, None])
        value = v[:, t]
        if beta is not None:
            value = beta[:, t, :, None] * (value - torch.einsum("bhkv,bhk->bhv", state, k[:, t]))
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], value)
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]) * KEY**-0.5)
    return torch.stack(outputs, 1), state


@pytest.mark.parametrize("kind", ["chunk", "fused_chunk", "fused_recurrent"])
def test_equals_the_recurrence_in_float64_with_every_gradient(mixer, kind):
    if kind not in _NAIVE[mixer]:
        pytest.skip("FLA has no such kernel of this mixer")
    given = inputs(mixer)
    got, want = kernel(mixer, kind)(**given, output_final_state=True), by_hand(mixer, **given)
    for a, b in zip(got, want, strict=True):
        close(a, b)
    weights = torch.linspace(-1, 2, want[0].numel(), dtype=torch.float64).view_as(want[0])
    gradients = [torch.autograd.grad((o * weights).sum() + s.sum(), given.values()) for o, s in (got, want)]
    for a, b in zip(*gradients, strict=True):
        close(a, b)


def test_bfloat16_is_accumulated_in_float32(mixer):
    given = inputs(mixer, dtype=torch.bfloat16)
    o, state = kernel(mixer)(**given, output_final_state=True)
    assert (o.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        wide, _ = kernel(mixer)(**{name: x.float() for name, x in given.items()})
    assert wide.dtype == torch.float32
    assert torch.equal(o, wide.bfloat16())


@pytest.mark.parametrize("v_first", [False, True])
def test_packed_sequences_with_states_equal_one_call_each(mixer, v_first):
    if mixer == "delta_rule" and v_first:
        pytest.skip("FLA's delta rule has one layout")
    given, layout = inputs(mixer, batch=1), {"state_v_first": True} if v_first else {}
    states = torch.randn(2, HEADS, *((VALUE, KEY) if v_first else (KEY, VALUE)), dtype=torch.float64)
    options = dict(scale=0.3, output_final_state=True, **layout)
    bounds = torch.tensor([0, 3, TOKENS])
    got = kernel(mixer)(**given, initial_state=states, cu_seqlens=bounds, **options)
    parts = [
        kernel(mixer)(
            **{name: x[:, a:b] for name, x in given.items()}, initial_state=states[n : n + 1], **options
        )
        for n, (a, b) in enumerate([(0, 3), (3, TOKENS)])
    ]
    close(got[0], torch.cat([o for o, _ in parts], 1))
    close(got[1], torch.cat([s for _, s in parts]))
    assert got[1].shape == states.shape


def test_a_state_carries_a_sequence_on_and_scale_is_a_factor(mixer):
    given = inputs(mixer)
    whole, final = kernel(mixer)(**given, output_final_state=True)
    first, second = ({name: x[:, part] for name, x in given.items()} for part in (slice(4), slice(4, None)))
    _, state = kernel(mixer)(**first, output_final_state=True)
    rest, last = kernel(mixer)(**second, initial_state=state, output_final_state=True)
    close(rest, whole[:, 4:])
    close(last, final)
    close(kernel(mixer)(**given, scale=1.0)[0], whole * KEY**0.5)


def test_reverse_runs_from_the_last_token():
    given = inputs("simple_gla")
    o, _ = kernel("simple_gla", "fused_recurrent")(**given, reverse=True)
    close(o.flip(1), by_hand("simple_gla", **{name: x.flip(1) for name, x in given.items()})[0])


def test_one_decay_a_head_and_none():
    given = inputs("simple_gla")
    gates = given.pop("g")
    decay = torch.tensor([-0.1, -0.7], dtype=torch.float64)
    close(
        kernel("simple_gla")(**given, g_gamma=decay)[0],
        by_hand("simple_gla", **given, g=decay.expand_as(gates))[0],
    )
    close(kernel("simple_gla")(**given)[0], by_hand("simple_gla", **given)[0])


def test_what_a_kernel_does_to_its_inputs():
    """Norms of q and k, the sigmoid of beta, the gate from its parameters, more heads of values than of keys."""
    given = inputs("kda")
    q, k, g, beta = (torch.randn_like(given[name]) for name in ("q", "k", "g", "beta"))
    A_log, dt_bias = torch.randn(HEADS, dtype=torch.float64), torch.randn(HEADS * KEY, dtype=torch.float64)
    got, _ = kernel("kda")(
        q[:, :, :1], k[:, :, :1], given["v"], g, beta, A_log=A_log, dt_bias=dt_bias, use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True,
    )  # fmt: skip
    norm = [
        (x[:, :, :1] / (x[:, :, :1].square().sum(-1, keepdim=True) + 1e-6).sqrt()).expand_as(x)
        for x in (q, k)
    ]
    gate = -A_log.exp()[:, None] * F.softplus(g + dt_bias.view(HEADS, KEY))
    close(got, by_hand("kda", *norm, given["v"], gate, 2 * beta.sigmoid())[0])


@pytest.mark.parametrize(
    ("mixer", "option"),
    [
        ("kda", {"lower_bound": -5.0}),
        ("kda", {"safe_gate": True}),
        ("gated_delta_rule", {"cp_context": object()}),
        ("delta_rule", {"head_first": True}),
    ],
)
def test_what_the_reference_has_not_is_refused_by_name(mixer, option):
    (name,) = option
    with pytest.raises(
        KernelError, match=rf"chunk_{mixer}: {name} is not computed on a CPU.*fla\.ops\.{mixer}"
    ):
        kernel(mixer)(**inputs(mixer), **option)
