"""FLA's recurrent kernels by their `formulas`: one adapter for every mixer.

What kernels share is added here: the dtype, packed sequences, states laid out [V, K], the default scale, and what a kernel
does to its inputs before the recurrence.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from titanplans.errors import KernelError
from titanplans.kernels.layers.norms import l2norm
from titanplans.kernels.layers.packing import Result, State, by_sequence, of_state
from titanplans.kernels.precision import accumulation_dtype, out_of_graphs, without_autocast
from titanplans.kernels.recurrent.gates import fused_additive_gate

_OVER_TIME = (
    "q",
    "r",
    "x",
    "k",
    "v",
    "a",
    "b",
    "kk",
    "p",
    "w",
    "s",
    "g",
    "gk",
    "beta",
    "g_atk",
    "beta_atk",
    "delta",
)
"""Inputs [B, T, ...]; first what every token has one of."""
_STATES = ("initial_state", "initial_A_state", "h_kk_init", "h_kv_init")
_NORMED = ("q", "k", "p")
"""Of which a kernel takes the norm on request."""
_WITHOUT_EFFECT = (
    *("cu_seqlens_cpu", "chunk_indices", "chunk_size", "checkpoint_level", "safe_gate", "lower_bound"),
    *("max_CG_iteration", "disable_recompute"),
)
"""How a kernel splits its work, which inputs it assumes, and how near it comes to a solution that is exact here."""


class Recurrence(NamedTuple):
    """A function of `formulas`, in the table of references."""

    formula: Callable[..., Result]


def by_formula(kernel: Callable[..., Any], reference: Recurrence) -> Callable[..., Result]:
    """Return a function with the arguments of `kernel` that computes by a formula.

    Inputs are [B, T, H, ...]; states are [N, H, K, V] (or [N, H, V, K] with `state_v_first`), N the number of packed
    sequences, or B. The output has the dtype of v, final states that of the accumulation. Torch differentiates it.

    The function raises:
        KernelError: an argument that the formula has not, by name.
    """
    signature, formula = inspect.signature(kernel), reference.formula
    has = inspect.signature(formula).parameters
    one_output = signature.return_annotation in (torch.Tensor, "torch.Tensor")

    @out_of_graphs(kernel)  # and a compiler would unroll the loop over chunks
    @functools.wraps(kernel)
    def compute(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        given |= given.pop("kwargs", {})
        of_tokens = "use_cache" in given
        given = {key: value for key, value in given.items() if value is not None and value is not False}
        result = _compute(kernel.__name__, formula, has, given, of_tokens)
        return result[0] if one_output else result

    return compute


def _compute(
    kernel: str, formula: Callable[..., Result], has: Any, given: dict[str, Any], of_tokens: bool
) -> Result:
    """`given` are the arguments that were, by name, without those that are None or False; `has` are the formula's.

    `of_tokens`: the second return value is no final state, but keys of each token, as for softmax attention.
    """
    dtype = accumulation_dtype(*(value for value in given.values() if isinstance(value, torch.Tensor)))
    like = given["v" if "v" in given else "x"]
    with without_autocast(like):
        over_time = [name for name in _OVER_TIME if isinstance(given.get(name), torch.Tensor)]
        inputs = {name: given.pop(name).to(dtype) for name in over_time}
        _before_the_recurrence(inputs, given)
        bounds, v_first = given.pop("cu_seqlens", None), given.pop("state_v_first", False)
        turn = (lambda x: x.transpose(-1, -2).contiguous()) if v_first else (lambda x: x)
        states = {
            name: of_state(lambda x: turn(x).to(dtype), given.pop(name)) for name in _STATES if name in given
        }
        if "scale" in has:
            given.setdefault("scale", inputs["k"].shape[-1] ** -0.5)
        reverse, wants_states = given.pop("reverse", False), given.pop("output_final_state", of_tokens)
        options = {name: value for name, value in given.items() if name not in _WITHOUT_EFFECT}
        if unknown := [name for name in (*inputs, *options, *states) if name not in has]:
            raise KernelError(
                f"{kernel}: {unknown[0]} is not computed on a CPU: {formula.__module__}.{formula.__name__} "
                "has no such argument; leave it out or run on a GPU"
            )

        def run(part: dict[str, torch.Tensor], states: dict[str, State]) -> Result:
            flip = (
                (lambda x: x.flip(1)) if reverse else (lambda x: x)
            )  # from the last token to the first, and back
            o, *finals = formula(**{name: flip(x) for name, x in part.items()}, **options, **states)
            return flip(o), *(finals if wants_states else [None] * len(finals))

        o, *finals = by_sequence(run, inputs, states, bounds, of_tokens)
    return o.to(like.dtype), *(of_state(turn, state) for state in finals)


def _before_the_recurrence(inputs: dict[str, torch.Tensor], given: dict[str, Any]) -> None:
    """What kernels do to `inputs` on request; the requests are taken out of `given`."""
    if given.pop("use_qk_l2norm_in_kernel", False):
        inputs |= {name: l2norm(x) for name, x in inputs.items() if name in _NORMED}
    if given.pop("use_beta_sigmoid_in_kernel", False):
        inputs["beta"] = inputs["beta"].sigmoid() * (2.0 if given.pop("allow_neg_eigval", False) else 1.0)
    if given.pop("use_gate_in_kernel", False):
        A_log, bias = given.pop("A_log", None), given.pop("dt_bias", None)
        inputs["g"] = gate(inputs["g"], A_log, bias, given.get("lower_bound"))
    if (decay := given.pop("g_gamma", None)) is not None:  # one for each head
        inputs["g"] = decay.to(inputs["v"].dtype).expand(inputs["v"].shape[:3])
    if "s" in inputs and "g" not in inputs:  # weights of slots are softmaxes over all tokens so far
        inputs["s"], inputs["g"], _ = fused_additive_gate(inputs["s"], cu_seqlens=given.get("cu_seqlens"))


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
