"""Stand-ins for FLA's recurrent kernels: their values, the options of FLA's functions, and refusals.

Each stand-in is compared with its definition, written here as a sum over earlier tokens if possible, otherwise as a loop.
"""

import functools
import importlib
import inspect
import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from tests.support.gradient_comparison import same
from titanplans.kernels import KernelError
from titanplans.kernels.recurrent import chunks
from titanplans.kernels.table import FORMULAS

BATCH, TOKENS, HEADS, KEY, SLOTS, STEPS = 2, 7, 2, 4, 5, 2
VALUES = {"mesa_net": KEY}
"""By kernel, the length of a value vector, if it is not 6."""
OVER_TIME = {
    "comba": {"p": (KEY,), "g": (), "beta": ()},
    "cyfa": {"g": (), "beta": (), "delta": ()},
    "delta_rule": {"beta": ()},
    "gated_delta_product": {"g": (), "beta": ()},
    "gated_delta_rule": {"g": (), "beta": ()},
    "gla": {"g": (KEY,)},
    "kda": {"g": (KEY,), "beta": ()},
    "mesa_net": {"g": (), "beta": ()},
    "path_attn": {"w": (KEY,), "g": (), "beta": ()},
    "precond_gated_delta_rule": {"g": (), "beta": (), "g_atk": (), "beta_atk": ()},
    "precond_kda": {"g": (KEY,), "beta": (), "g_atk": (), "beta_atk": ()},
    "simple_gla": {"g": ()},
}
"""The inputs after q, k and v, with their dimensions after [B, T, H]."""
STATES = {
    "mesa_net": ("h_kk_init", "h_kv_init"),
    "path_attn": (),
    "precond_gated_delta_rule": ("initial_state", "initial_A_state"),
    "precond_kda": ("initial_state", "initial_A_state"),
}
"""The names of a kernel's arguments for states, if they are not just `initial_state`."""
MIXERS = sorted(OVER_TIME)


pytestmark = pytest.mark.usefixtures("cpu_kernels")


@pytest.fixture(autouse=True)
def _several_chunks(monkeypatch):
    """Make chunks small, so that seven tokens are two chunks."""
    monkeypatch.setattr(chunks, "CHUNK_SIZE", 4)
    monkeypatch.setattr(chunks, "CHUNK_SIZE_OF_SLOTS", 4)


def test_every_reference_is_tested_here():
    assert FORMULAS.keys() <= OVER_TIME.keys() | OTHERS


OTHERS = {"abc", "gsa", "hgrn", "rwkv6", "rwkv7"}
"""Kernels that other files test."""


def kernel(mixer, kind=None):
    return getattr(importlib.import_module(f"fla.ops.{mixer}"), f"{kind or FORMULAS[mixer][1]}_{mixer}")


def randn(*sizes, seed):
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def inputs(mixer, batch=BATCH, tokens=TOKENS, dtype=torch.float64, seed=0):
    """Return the inputs of a mixer's kernel that have values for each token."""
    arguments = {}
    sizes = {"q": (KEY,), "k": (KEY,), "v": (VALUES.get(mixer, 6),)} | OVER_TIME[mixer]
    for index, (name, size) in enumerate(sizes.items()):
        several = mixer == "gated_delta_product" and name in ("k", "v", "beta")
        x = randn(batch, tokens * (STEPS if several else 1), HEADS, *size, seed=100 * seed + index)
        if name in ("k", "p", "w"):
            x = F.normalize(x, dim=-1)
        elif name in ("g", "g_atk"):
            x = F.logsigmoid(x)
        elif name in ("beta", "beta_atk", "delta"):
            x = x.sigmoid()
        arguments[name] = x.to(dtype).requires_grad_()
    return arguments


def options(mixer, dtype=torch.float64):
    """Return the other arguments of a mixer's kernel."""
    arguments = {}
    if mixer == "gated_delta_product":
        arguments = {"num_householder": STEPS}
    elif mixer == "mesa_net":
        arguments = {"lamb": 0.25 + randn(HEADS, KEY, seed=7).exp()}
    elif mixer.startswith("precond"):
        arguments = {"log_atk_scale": randn(HEADS, seed=7), "x": 1.4, "eps": 1e-4}
        arguments["use_qk_l2norm_in_kernel"] = True
    elif mixer == "cyfa":
        arguments = {"readout": randn(HEADS, SLOTS, SLOTS, seed=7), "q_norm_eps": 1e-3, "k_norm_eps": 1e-4}
        arguments |= {f"{x}_norm_weight": randn(KEY, seed=n) for n, x in enumerate("qk")}
    return {
        name: x.to(dtype).requires_grad_() if isinstance(x, torch.Tensor) else x
        for name, x in arguments.items()
    }


def close(got, want, tolerance=1e-13):
    """Check equality of float64 sums of some tens of terms of order 1."""
    if isinstance(got, tuple):
        for a, b in zip(got, want, strict=True):
            close(a, b, tolerance)
        return
    assert got.dtype == want.dtype
    assert (got - want).abs().max() <= tolerance * max(1.0, want.abs().max().item())


def decays(g):
    """Return the decay from each token to each later token, and 0 to earlier tokens; [B, T, S, ...] for g [B, T, ...]."""
    past = g.cumsum(1)
    later = (
        torch.ones(g.shape[1], g.shape[1], dtype=torch.bool)
        .tril()
        .view(1, *2 * g.shape[1:2], *[1] * (g.dim() - 2))
    )
    return (past[:, :, None] - past[:, None]).masked_fill(~later, -torch.inf).exp()


def delta_by_hand(q, k, v, g=None, beta=None, **preconditioner):
    """S = decay(g_t) S; then S = S + w_t (beta_t (v_t - S^T k_t))^T, o_t = K^-0.5 S^T q_t; w is k, beta may be missing."""
    batch, tokens, heads, size = q.shape
    steps = k.shape[1] // tokens
    state, outputs = q.new_zeros(batch, heads, size, v.shape[-1]), []
    written = preconditioned(k, **preconditioner) if preconditioner else (k, None)
    for t in range(tokens):
        if g is not None:
            gate = g[:, t].exp()
            state = state * (gate[..., None] if gate.dim() == 3 else gate[..., None, None])
        for s in range(t * steps, (t + 1) * steps):
            value = v[:, s]
            if beta is not None:
                value = beta[:, s, :, None] * (value - torch.einsum("bhkv,bhk->bhv", state, k[:, s]))
            state = state + torch.einsum("bhk,bhv->bhkv", written[0][:, s], value)
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]) * size**-0.5)
    states = (state,) if written[1] is None else (state, written[1])
    return torch.stack(outputs, 1), *states


def comba_by_hand(q, k, v, p, g, beta):
    """S = decay(g_t) S + k_t (beta_t (v_t - S^T p_t))^T, o_t = K^-0.5 S^T q_t; p reads the state before its decay."""
    state, outputs = q.new_zeros(q.shape[0], *k.shape[2:], v.shape[-1]), []
    for t in range(q.shape[1]):
        value = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhkv,bhk->bhv", state, p[:, t]))
        state = state * g[:, t, :, None, None].exp() + torch.einsum("bhk,bhv->bhkv", k[:, t], value)
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]) * KEY**-0.5)
    return torch.stack(outputs, 1), state


def preconditioned(k, g_atk, beta_atk, log_atk_scale, x, eps):
    """Return the preconditioned keys, and the last sum of decayed squares."""
    squares = torch.einsum("btsh,bsh,bshk->bthk", decays(g_atk), beta_atk, k.square())
    r = (squares + eps).log() - log_atk_scale[:, None]
    return k * x ** -(r / (1 + r.abs())), squares[:, -1]


def product_by_hand(num_householder, **arguments):
    return delta_by_hand(**arguments)


def precond_by_hand(q, k, *, epsilon=0.0, use_qk_l2norm_in_kernel, **arguments):
    q, k = (x / (x.square().sum(-1, keepdim=True) + epsilon).sqrt() for x in (q, k))
    return delta_by_hand(q, k, **arguments)


def mesa_by_hand(q, k, v, g, beta, lamb):
    """Ridge regression over the past: o_t = v^T W k (k^T W k + diag(lamb))^-1 q_t, with decays times betas in W."""
    keys, values = (torch.einsum("btsh,bsh,bshk,bshv->bthkv", decays(g), beta, k, x) for x in (k, v))
    system = keys + torch.diag_embed(lamb)
    o = torch.einsum("bthkv,bthk->bthv", values, torch.linalg.inv(system).matmul(q[..., None])[..., 0])
    return o, keys[:, -1], values[:, -1]


def path_by_hand(q, k, v, w, beta, g):
    """Softmax attention whose earlier keys are multiplied by I - beta_t w_t w_t^T at each token t."""
    keys, outputs = k[:, :0], []
    past = g.cumsum(1)
    for t in range(q.shape[1]):
        along = torch.einsum("bshk,bhk->bsh", keys, w[:, t])
        keys = keys - torch.einsum("bsh,bh,bhk->bshk", along, beta[:, t], w[:, t])
        keys = torch.cat([keys, k[:, t : t + 1]], 1)
        scores = torch.einsum("bshk,bhk->bsh", keys, q[:, t]) + past[:, t : t + 1] - past[:, : t + 1]
        outputs.append(torch.einsum("bsh,bshv->bhv", (scores * KEY**-0.5).softmax(1), v[:, : t + 1]))
    return torch.stack(outputs, 1), None


def cyfa_by_hand(q, k, v, g, delta, beta, readout, **norms):
    """Attention to slots of relative time. Dirichlet's kernel puts past tokens into the slots near their clock distance."""
    q, k = (
        F.rms_norm(x, (KEY,), norms[f"{name}_norm_weight"], norms[f"{name}_norm_eps"])
        for name, x in (("q", q), ("k", k))
    )
    clock = delta.cumsum(1)
    distance = clock[:, :, None] - clock[:, None]  # [B, T, S, H]
    offset = torch.arange(SLOTS, dtype=q.dtype) - distance[..., None]
    waves = torch.arange(1, SLOTS // 2 + 1, dtype=q.dtype) * (2 * math.pi / SLOTS)
    kernel = (1 + 2 * (offset[..., None] * waves).cos().sum(-1)) / SLOTS
    read = torch.einsum("hrc,btshc,btsh,bsh->btshr", readout, kernel, decays(g), beta)
    logits = torch.einsum("btshr,bthk,bshk->bthr", read, q * KEY**-0.5, k)
    return torch.einsum("bthr,btshr,bshv->bthv", logits.softmax(-1), read, v), None


BY_HAND = {
    "comba": comba_by_hand,
    "cyfa": cyfa_by_hand,
    "gated_delta_product": product_by_hand,
    "mesa_net": mesa_by_hand,
    "path_attn": path_by_hand,
    "precond_gated_delta_rule": functools.partial(precond_by_hand, epsilon=1e-6),
    "precond_kda": functools.partial(precond_by_hand, epsilon=1e-6),
}


def by_hand(mixer, **arguments):
    return BY_HAND.get(mixer, delta_by_hand)(**arguments)


@pytest.mark.parametrize(("mixer", "kind"), [(m, kind) for m in MIXERS for kind in FORMULAS[m][1:]])
def test_a_kernel_equals_its_definition_in_float64_with_every_gradient(mixer, kind):
    arguments = inputs(mixer) | options(mixer)
    final = {} if kind == "parallel" else {"output_final_state": True}
    gates = {"gk": arguments["g"]} if (mixer, kind) == ("gla", "fused_recurrent") else {}
    named = {name: x for name, x in arguments.items() if not gates or name != "g"} | gates
    got, want = kernel(mixer, kind)(**named, **final), by_hand(mixer, **arguments)
    want = (want[0], *(None for _ in want[1:])) if kind == "parallel" else want
    if mixer == "cyfa":  # this file has no formula for its states
        got = (got[0], None)
    assert [x is None for x in got] == [x is None for x in want]
    same(got, want, [x for x in arguments.values() if isinstance(x, torch.Tensor)])


@pytest.mark.parametrize("bounds", [[0, 70], [0, 1, 4, 70]])
def test_comba_equals_the_chunk_reference_of_fla(bounds):
    """FLA's reference for its chunk kernel computes in float32, and takes one sequence at a time."""
    from fla.ops.comba.naive import naive_chunk_comba

    arguments = inputs("comba", batch=1, tokens=70, dtype=torch.float32)
    got = kernel("comba")(**arguments, output_final_state=True, cu_seqlens=torch.tensor(bounds))
    sequences = [
        naive_chunk_comba(**{name: x[:, a:b] for name, x in arguments.items()}, output_final_state=True)
        for a, b in itertools.pairwise(bounds)
    ]
    want = [torch.cat(x, dim) for x, dim in zip(zip(*sequences, strict=True), (1, 0), strict=True)]
    same(got, want, [*arguments.values()], 1e-5)


@pytest.mark.parametrize("mixer", MIXERS)
def test_bfloat16_is_accumulated_in_float32(mixer):
    arguments, more = inputs(mixer, dtype=torch.bfloat16), options(mixer, torch.float32)
    o, *_ = kernel(mixer)(**arguments, **more)
    assert o.dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        wide, *_ = kernel(mixer)(**{name: x.float() for name, x in arguments.items()}, **more)
    assert wide.dtype == torch.float32
    assert torch.equal(o, wide.bfloat16())


def tokens_between(arguments, first, end):
    """Return the inputs of the tokens from `first` to `end`."""
    tokens = arguments["q"].shape[1]
    return {name: x[:, first * (n := x.shape[1] // tokens) : end * n] for name, x in arguments.items()}


def named(mixer, states):
    return dict(zip(STATES.get(mixer, ("initial_state",)), states, strict=True))


@pytest.mark.parametrize(
    ("mixer", "layout"),
    [*((m, {}) for m in MIXERS), *((m, {"state_v_first": True}) for m in ("gated_delta_rule", "gla", "kda"))],
)
def test_packed_sequences_with_states_equal_one_call_each(mixer, layout):
    arguments = inputs(mixer, batch=1)
    more = options(mixer) | layout | ({} if mixer == "path_attn" else {"output_final_state": True})
    if "scale" in inspect.signature(kernel(mixer)).parameters:
        more["scale"] = 0.3
    _, *states = kernel(mixer)(**inputs(mixer, seed=1), **more)
    states = [] if mixer == "path_attn" else states
    got = kernel(mixer)(**arguments, **named(mixer, states), cu_seqlens=torch.tensor([0, 3, TOKENS]), **more)
    for n, (a, b) in enumerate([(0, 3), (3, TOKENS)]):
        state_of_sequence = [
            tuple(x[n : n + 1] for x in s) if isinstance(s, tuple) else s[n : n + 1] for s in states
        ]
        o, *finals = kernel(mixer)(
            **tokens_between(arguments, a, b), **named(mixer, state_of_sequence), **more
        )
        close(got[0][:, a:b], o)
        for packed, final in zip(got[1:], finals, strict=True):
            if final is not None:
                close(
                    tuple(x[n : n + 1] for x in packed) if isinstance(packed, tuple) else packed[n : n + 1],
                    final,
                )


@pytest.mark.parametrize("mixer", [m for m in MIXERS if m != "path_attn"])
def test_states_continue_a_sequence(mixer):
    arguments, more = inputs(mixer), options(mixer) | {"output_final_state": True}
    full, *finals = kernel(mixer)(**arguments, **more)
    _, *states = kernel(mixer)(**tokens_between(arguments, 0, 4), **more)
    continued, *last = kernel(mixer)(**tokens_between(arguments, 4, TOKENS), **named(mixer, states), **more)
    close(continued, full[:, 4:])
    close(tuple(last), tuple(finals))


@pytest.mark.parametrize("mixer", [m for m in MIXERS if m != "path_attn"])
def test_states_of_another_count_of_sequences_are_refused(mixer):
    """FLA's kernels refuse such states, too. MoM has such states if not all of its memories are used."""
    arguments, more = inputs(mixer, batch=1), options(mixer) | {"output_final_state": True}
    _, *states = kernel(mixer)(**inputs(mixer, batch=3), **more)
    with pytest.raises(KernelError, match="3 states, but cu_seqlens has 2 sequences"):
        kernel(mixer)(**arguments, **named(mixer, states), cu_seqlens=torch.tensor([0, 3, TOKENS]), **more)


def test_states_are_returned_only_on_request():
    for mixer in MIXERS:
        _, *states = kernel(mixer)(**inputs(mixer), **options(mixer))
        assert all(state is None for state in states), mixer


@pytest.mark.parametrize("mixer", [m for m in MIXERS if m not in ("mesa_net", "path_attn", "cyfa")])
def test_scale_is_a_factor(mixer):
    arguments = inputs(mixer) | options(mixer)
    close(kernel(mixer)(**arguments, scale=1.0)[0], kernel(mixer)(**arguments)[0] * KEY**0.5)


def test_one_token_of_mesa_net():
    from fla.ops.mesa_net import mesa_net_decoding_one_step

    arguments, lamb = inputs("mesa_net"), options("mesa_net")["lamb"]
    full, *finals = kernel("mesa_net")(**arguments, lamb=lamb, output_final_state=True)
    _, *states = kernel("mesa_net")(
        **tokens_between(arguments, 0, TOKENS - 1), lamb=lamb, output_final_state=True
    )
    last = {name: x[:, -1] for name, x in arguments.items()}
    o, *after = mesa_net_decoding_one_step(**last, lamb=lamb, prev_h_kk=states[0], prev_h_kv=states[1])
    close(o, full[:, -1])
    close(tuple(after), tuple(finals))


def test_keys_of_path_attention_are_cached_for_decoding():
    """Queries of the last token attend to the cached keys as in softmax attention."""
    from fla.ops.attn.decoding import attn_decoding_one_step

    arguments, bounds = inputs("path_attn", batch=1), torch.tensor([0, 3, TOKENS])
    o, keys = kernel("path_attn")(**arguments, cu_seqlens=bounds, use_cache=True)
    last = arguments["q"][:, bounds[1:] - 1]
    got = attn_decoding_one_step(
        last, keys, arguments["v"], arguments["g"], cu_seqlens=bounds, do_gate_scale=True
    )
    close(got, o[:, bounds[1:] - 1])


def test_reverse_runs_from_the_last_token():
    arguments = inputs("simple_gla")
    o, _ = kernel("simple_gla", "fused_recurrent")(**arguments, reverse=True)
    close(o.flip(1), by_hand("simple_gla", **{name: x.flip(1) for name, x in arguments.items()})[0])


def test_one_decay_per_head_and_none():
    arguments = inputs("simple_gla")
    gates = arguments.pop("g")
    decay = torch.tensor([-0.1, -0.7], dtype=torch.float64)
    close(
        kernel("simple_gla")(**arguments, g_gamma=decay)[0],
        by_hand("simple_gla", **arguments, g=decay.expand_as(gates))[0],
    )
    for mixer in ("simple_gla", "path_attn", "gated_delta_product"):
        arguments, more = inputs(mixer), options(mixer)
        gates = arguments.pop("g")
        without = {"g": None} if mixer == "gated_delta_product" else {}
        want = by_hand(mixer, **arguments, **more, g=torch.zeros_like(gates))[0]
        close(kernel(mixer)(**arguments, **more, **without)[0], want)


@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_options_that_transform_the_inputs(lower_bound):
    """Norms of q and k, the sigmoid of beta, a gate computed from parameters, and more value heads than key heads."""
    from fla.ops.kda.gate import fused_kda_gate

    arguments = inputs("kda")
    q, k, g, beta = (torch.randn_like(arguments[name]) for name in ("q", "k", "g", "beta"))
    A_log, dt_bias = torch.randn(HEADS, dtype=torch.float64), torch.randn(HEADS * KEY, dtype=torch.float64)
    parameters = dict(A_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound)
    got, _ = kernel("kda")(
        q[:, :, :1], k[:, :, :1], arguments["v"], g, beta, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True, safe_gate=lower_bound is not None, **parameters,
    )  # fmt: skip
    norm = [
        (x[:, :, :1] / (x[:, :, :1].square().sum(-1, keepdim=True) + 1e-6).sqrt()).expand_as(x)
        for x in (q, k)
    ]
    x, rate = g + dt_bias.view(HEADS, KEY), A_log.exp()[:, None]
    gate = -rate * F.softplus(x) if lower_bound is None else lower_bound * (rate * x).sigmoid()
    close(fused_kda_gate(g, **parameters), gate)
    close(got, by_hand("kda", q=norm[0], k=norm[1], v=arguments["v"], g=gate, beta=2 * beta.sigmoid())[0])


@pytest.mark.parametrize("mixer", ["comba", "gated_delta_rule", "precond_gated_delta_rule"])
def test_more_value_heads_than_key_heads(mixer):
    arguments, more = inputs(mixer), options(mixer)
    of_keys = {"q", "k", "p", "g_atk", "beta_atk", "log_atk_scale"}
    few = {
        name: (x[:1] if x.dim() == 1 else x[:, :, :1]) if name in of_keys else x
        for name, x in (arguments | more).items()
    }
    repeated = {
        name: (x.repeat(2) if x.dim() == 1 else x.repeat_interleave(2, 2)) if name in of_keys else x
        for name, x in few.items()
    }
    got, want = kernel(mixer)(**few, output_final_state=True), by_hand(mixer, **repeated)
    close(got[0], want[0])
    close(got[1], want[1])
    if len(want) == 3:  # one state for each key head
        close(got[2], want[2][:, :1])


@pytest.mark.parametrize(
    ("mixer", "option", "reason"),
    [
        ("kda", {"cp_context": object()}, "has no such argument"),
        ("gated_delta_rule", {"cp_context": object()}, "has no such argument"),
        ("delta_rule", {"head_first": True}, "has no such argument"),
        ("gla", {"gv": torch.zeros(1)}, "has no such argument"),
    ],
)
def test_arguments_that_the_reference_lacks_are_refused(mixer, option, reason):
    (name,) = option
    arguments = {} if mixer == "gla" else inputs(mixer) | options(mixer)
    arguments = {x: inputs(mixer)[x] for x in ("q", "k", "v")} | arguments | option
    with pytest.raises(KernelError, match=rf"_{mixer}: {name}.* is not computed on a CPU.*{reason}"):
        kernel(mixer, "fused_recurrent" if mixer == "gla" else None)(**arguments)


@pytest.mark.parametrize("mixer", ["gated_delta_rule", "gla", "gsa", "kda"])
def test_gates_of_minus_infinity_and_strong_gates(mixer):
    """A gate of minus infinity clears the state; in float32 nothing overflows."""
    arguments = inputs("kda" if mixer == "gsa" else mixer)
    if mixer == "gsa":
        arguments["s"] = arguments.pop("beta")[..., None].expand_as(arguments["g"])
    with torch.no_grad():
        arguments["g"][:, 3] = -torch.inf
    full, _ = kernel(mixer, "chunk")(**arguments)
    after_gate, _ = kernel(mixer, "chunk")(**tokens_between(arguments, 3, TOKENS))
    close(after_gate, full[:, 3:])
    strong = {name: x.detach().float().requires_grad_() for name, x in arguments.items()}
    strong["g"] = torch.full_like(strong["g"], -90.0, requires_grad=True)
    o, _ = kernel(mixer, "chunk")(**strong)
    for x in (o, *torch.autograd.grad(o.sum(), [*strong.values()])):
        assert x.isfinite().all()
