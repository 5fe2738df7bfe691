"""FLA's own references, `fla/ops/*/naive.py`, in place of its kernels: one adapter for every mixer.

They loop over time, so they are for short sequences, such as those of a proof. What they lack is added here: float64
throughout, packed sequences, states laid out [V, K], and what a kernel does to its inputs before the recurrence.
"""

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from titanplans.errors import KernelError
from titanplans.modeling.kernels.norms import l2norm
from titanplans.modeling.kernels.packing import Result, State, by_sequence, of_state
from titanplans.modeling.kernels.precision import accumulation_dtype
from titanplans.proof.modes import Widen

_OVER_TIME = ("q", "k", "v", "p", "w", "g", "gk", "beta", "g_atk", "beta_atk", "delta")
"""Inputs [B, T, ...]; queries first, of which every token has one."""
_STATES = ("initial_state", "initial_A_state", "h_kk_init", "h_kv_init")
_NORMED = ("q", "k", "p")
"""Of which a kernel takes the norm on request."""
_WITHOUT_EFFECT = (
    *("cu_seqlens_cpu", "chunk_indices", "chunk_size", "checkpoint_level", "safe_gate", "lower_bound"),
    "max_CG_iteration",
)
"""How a kernel splits its work, what it may take for granted, and how near it comes to a solution that is exact here."""

_HEADS_FIRST = ("delta_rule_recurrence",)
"""References of [B, H, T, ...]; all others are of [B, T, H, ...], as the kernels are."""
_GROUPED = ("naive_recurrent_precond_gated_delta_rule",)
"""References with a state of each key head, so that they repeat queries and keys for the heads of values themselves."""
_NORMING = ("naive_recurrent_precond_gated_delta_rule",)
"""References that take the norm of queries and keys themselves, without an epsilon."""


def recurrence(kernel: Callable[..., Any], reference: str) -> Callable[..., Result]:
    """Return a function with the arguments of `kernel` that computes by the `reference`, "fla.ops.delta_rule.naive:f".

    Inputs are [B, T, H, ...]; states are [N, H, K, V] (or [N, H, V, K] with `state_v_first`), N the number of packed
    sequences, or B. The output has the dtype of v, final states that of the accumulation. Torch differentiates it.

    The function raises:
        KernelError: an argument that the reference has not, by name.
    """
    module, _, name = reference.partition(":")
    signature = inspect.signature(kernel)

    @torch.compiler.disable  # as FLA's kernels are; and a compiler would unroll the loop
    @functools.wraps(kernel)
    def compute(*args: Any, **kwargs: Any) -> Result:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        given |= given.pop("kwargs", {})
        naive = getattr(importlib.import_module(module), name)
        stateless = "output_final_state" not in given.keys() | inspect.signature(naive).parameters
        given = {key: value for key, value in given.items() if value is not None and value is not False}
        return _compute(kernel.__name__, naive, given, stateless)

    return compute


def _compute(kernel: str, naive: Callable[..., Any], given: dict[str, Any], stateless: bool) -> Result:
    """`given` are the arguments that were, by name, without those that are None or False.

    `stateless`: what is returned beside outputs is no final state, but has a number for each token as they have.
    """
    dtype = accumulation_dtype(*(value for value in given.values() if isinstance(value, torch.Tensor)))
    out_dtype = given["v"].dtype
    with torch.autocast(given["v"].device.type, enabled=False):
        inputs = {name: given.pop(name).to(dtype) for name in _OVER_TIME if name in given}
        _before_the_recurrence(kernel, naive, inputs, given)
        bounds, v_first = given.pop("cu_seqlens", None), given.pop("state_v_first", False)
        turn = (lambda x: x.transpose(-1, -2).contiguous()) if v_first else (lambda x: x)
        states = {
            name: of_state(lambda x: turn(x).to(dtype), given.pop(name)) for name in _STATES if name in given
        }
        has = inspect.signature(naive).parameters
        if "g" in has and has["g"].default is inspect.Parameter.empty and "g" not in inputs:
            inputs["g"] = inputs["q"].new_zeros(inputs["q"].shape[:3])  # no decay
        size = inputs["q"].shape[-1]
        if "scale" in has:
            given.setdefault("scale", size**-0.5)
        elif "scale" in given:  # then it is K ** -0.5
            inputs["q"] = inputs["q"] * (given.pop("scale") * size**0.5)
        reverse, wants_states = given.pop("reverse", False), given.pop("output_final_state", stateless)
        options = {name: value for name, value in given.items() if name not in _WITHOUT_EFFECT}
        if unknown := [name for name in (*inputs, *options, *states) if name not in has]:
            raise _refusal(kernel, naive, f"{unknown[0]}", "has no such argument; leave it out")
        if "output_final_state" in has:
            options["output_final_state"] = wants_states

        def run(part: dict[str, torch.Tensor], states: dict[str, State]) -> Result:
            # From the last token to the first, and [B, H, T, ...], and back.
            flip = (lambda x: x.flip(1)) if reverse else (lambda x: x)
            swap = (lambda x: x.transpose(1, 2)) if naive.__name__ in _HEADS_FIRST else (lambda x: x)
            part = {name: swap(flip(x)) for name, x in part.items()}
            with Widen(dtype):
                result = naive(**part, **options, **states)
            o, *finals = result if isinstance(result, tuple) else (result, None)
            return flip(swap(o)), *(finals if wants_states else [None] * len(finals))

        o, *finals = by_sequence(run, inputs, states, bounds, stateless)
    return o.to(out_dtype), *(of_state(turn, state) for state in finals)


def _before_the_recurrence(
    kernel: str, naive: Callable[..., Any], inputs: dict[str, torch.Tensor], given: dict[str, Any]
) -> None:
    """What kernels do to `inputs` on request; the requests are taken out of `given`."""
    normed = given.pop("use_qk_l2norm_in_kernel", False)
    if naive.__name__ in _NORMING and not normed:
        raise _refusal(kernel, naive, "use_qk_l2norm_in_kernel = False", "takes these norms; leave it True")
    if normed and naive.__name__ not in _NORMING:
        inputs |= {name: l2norm(x) for name, x in inputs.items() if name in _NORMED}
    if given.pop("use_beta_sigmoid_in_kernel", False):
        inputs["beta"] = inputs["beta"].sigmoid() * (2.0 if given.pop("allow_neg_eigval", False) else 1.0)
    if given.pop("use_gate_in_kernel", False):
        A_log, bias = given.pop("A_log", None), given.pop("dt_bias", None)
        inputs["g"] = gate(inputs["g"], A_log, bias, given.get("lower_bound"))
    if (decay := given.pop("g_gamma", None)) is not None:  # one for each head
        inputs["g"] = decay.to(inputs["v"].dtype).expand(inputs["v"].shape[:3])
    groups = inputs["v"].shape[2] // inputs["q"].shape[2]
    if groups > 1 and naive.__name__ not in _GROUPED:  # several heads of values for one of queries and keys
        inputs |= {name: x.repeat_interleave(groups, 2) for name, x in inputs.items() if name in _NORMED}


def gate(
    g: torch.Tensor,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    lower_bound: float | None = None,
    output_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Return the gate of `g` [B, T, H] or [B, T, H, K], as FLA's `fused_kda_gate`: the logarithm of a decay.

        -exp(A_log) softplus(g + dt_bias),  with a bound:  lower_bound sigmoid(exp(A_log) (g + dt_bias))

    `A_log` is [H], `dt_bias` [H] or [H * K]. Of float64 it is float64, else `output_dtype`.
    """
    dtype = accumulation_dtype(g, A_log, dt_bias)
    x = g.to(dtype) if dt_bias is None else g.to(dtype) + dt_bias.to(dtype).view(g.shape[2:])
    rate = 1.0 if A_log is None else A_log.to(dtype).exp().view(-1, *[1] * (g.dim() - 3))
    y = -rate * F.softplus(x) if lower_bound is None else lower_bound * (rate * x).sigmoid()
    return y if dtype == torch.float64 else y.to(output_dtype)


def _refusal(kernel: str, naive: Callable[..., Any], what: str, why: str) -> KernelError:
    return KernelError(
        f"{kernel}: {what} is not computed on a CPU: {naive.__module__}.{naive.__name__}, FLA's own reference, {why} or "
        "run on a GPU"
    )
