"""Adapt the `formulas` of recurrences to the signatures of FLA's kernels. Start at `by_formula`.

The adapter adds the features that all kernels have: accumulation dtypes, packed sequences, states in the layout [V, K],
the default scale, and the preprocessing of inputs.
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
"""Names of inputs [B, T, ...]. Inputs that have exactly one step per token come first, as `by_sequence` requires."""
_STATES = ("initial_state", "initial_A_state", "h_kk_init", "h_kv_init")
_NORMED = ("q", "k", "p")
"""Inputs that `use_qk_l2norm_in_kernel` normalizes."""
_WITHOUT_EFFECT = (
    *("cu_seqlens_cpu", "chunk_indices", "chunk_size", "checkpoint_level", "safe_gate", "lower_bound"),
    *("max_CG_iteration", "disable_recompute"),
)
"""Arguments without effect: how a kernel divides its work, its assumptions about inputs, and the accuracy of a solution
that is exact here."""


class Recurrence(NamedTuple):
    """An entry of the table of replacements: a function of `formulas`."""

    formula: Callable[..., Result]


def by_formula(kernel: Callable[..., Any], reference: Recurrence) -> Callable[..., Result]:
    """Return a function with the arguments of `kernel` that computes a formula. Torch differentiates it.

    Inputs are [B, T, H, ...]. States are [N, H, K, V], or [N, H, V, K] with `state_v_first`, where N is the number of packed
    sequences, or B. The output has the dtype of v, and final states have the accumulation dtype.

    The function raises:
        KernelError: an argument is set that the formula does not have.
    """
    signature, formula = inspect.signature(kernel), reference.formula
    parameters = inspect.signature(formula).parameters
    has_one_output = signature.return_annotation in (torch.Tensor, "torch.Tensor")

    @out_of_graphs(kernel)  # torch.compile would also unroll the loop over chunks
    @functools.wraps(kernel)
    def compute(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        arguments = bound.arguments
        arguments |= arguments.pop("kwargs", {})
        of_tokens = "use_cache" in arguments
        arguments = {
            key: value for key, value in arguments.items() if value is not None and value is not False
        }
        result = _compute(kernel.__name__, formula, parameters, arguments, of_tokens)
        return result[0] if has_one_output else result

    return compute


def _compute(
    kernel: str, formula: Callable[..., Result], parameters: Any, arguments: dict[str, Any], of_tokens: bool
) -> Result:
    """Compute `formula`.

    Args:
        kernel: the kernel's name, for errors.
        formula: a function of `formulas`.
        parameters: the names of the formula's parameters.
        arguments: the arguments by name, without those that are None or False; changed in place.
        of_tokens: the second result is not a final state, but the keys of each token, as in softmax attention.
    """
    dtype = accumulation_dtype(*(value for value in arguments.values() if isinstance(value, torch.Tensor)))
    values = arguments["v" if "v" in arguments else "x"]
    with without_autocast(values):
        over_time = [name for name in _OVER_TIME if isinstance(arguments.get(name), torch.Tensor)]
        inputs = {name: arguments.pop(name).to(dtype) for name in over_time}
        _preprocess(inputs, arguments)
        bounds, v_first = arguments.pop("cu_seqlens", None), arguments.pop("state_v_first", False)
        transpose = (lambda x: x.transpose(-1, -2).contiguous()) if v_first else (lambda x: x)
        states = {
            name: of_state(lambda x: transpose(x).to(dtype), arguments.pop(name))
            for name in _STATES
            if name in arguments
        }
        if "scale" in parameters:
            arguments.setdefault("scale", inputs["k"].shape[-1] ** -0.5)
        reverse, wants_states = (
            arguments.pop("reverse", False),
            arguments.pop("output_final_state", of_tokens),
        )
        options = {name: value for name, value in arguments.items() if name not in _WITHOUT_EFFECT}
        if unknown := [name for name in (*inputs, *options, *states) if name not in parameters]:
            raise KernelError(
                f"{kernel}: {unknown[0]} is not computed on a CPU: {formula.__module__}.{formula.__name__} "
                "has no such argument; remove it or run on a GPU"
            )

        def run(batch: dict[str, torch.Tensor], states: dict[str, State]) -> Result:
            # With `reverse`, run over the tokens from the last to the first.
            flip = (lambda x: x.flip(1)) if reverse else (lambda x: x)
            o, *finals = formula(**{name: flip(x) for name, x in batch.items()}, **options, **states)
            return flip(o), *(finals if wants_states else [None] * len(finals))

        o, *finals = by_sequence(run, inputs, states, bounds, of_tokens)
    return o.to(values.dtype), *(of_state(transpose, state) for state in finals)


def _preprocess(inputs: dict[str, torch.Tensor], arguments: dict[str, Any]) -> None:
    """Preprocess `inputs` in place, as `arguments` ask a kernel to do, and remove the arguments that ask for it."""
    if arguments.pop("use_qk_l2norm_in_kernel", False):
        inputs |= {name: l2norm(x) for name, x in inputs.items() if name in _NORMED}
    if arguments.pop("use_beta_sigmoid_in_kernel", False):
        inputs["beta"] = inputs["beta"].sigmoid() * (2.0 if arguments.pop("allow_neg_eigval", False) else 1.0)
    if arguments.pop("use_gate_in_kernel", False):
        A_log, bias = arguments.pop("A_log", None), arguments.pop("dt_bias", None)
        inputs["g"] = gate(inputs["g"], A_log, bias, arguments.get("lower_bound"))
    if (decay := arguments.pop("g_gamma", None)) is not None:  # one per head, the same for all tokens
        inputs["g"] = decay.to(inputs["v"].dtype).expand(inputs["v"].shape[:3])
    # Without a gate, the weight of a slot is a softmax over tokens up to t
    if "s" in inputs and "g" not in inputs:
        inputs["s"], inputs["g"], _ = fused_additive_gate(inputs["s"], cu_seqlens=arguments.get("cu_seqlens"))


def gate(
    g: torch.Tensor,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    lower_bound: float | None = None,
    output_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Return the log decay of `g` [B, T, H] or [B, T, H, K], as FLA's `fused_kda_gate`.

        -exp(A_log) softplus(g + dt_bias),  with a bound:  lower_bound sigmoid(exp(A_log) (g + dt_bias))

    `A_log` is [H], `dt_bias` [H] or [H * K]. The result is float64 for a float64 input, else `output_dtype`.
    """
    dtype = accumulation_dtype(g, A_log, dt_bias)
    x = g.to(dtype) if dt_bias is None else g.to(dtype) + dt_bias.to(dtype).view(g.shape[2:])
    rate = 1.0 if A_log is None else A_log.to(dtype).exp().view(-1, *[1] * (g.dim() - 3))
    y = -rate * F.softplus(x) if lower_bound is None else lower_bound * (rate * x).sigmoid()
    return y if dtype == torch.float64 else y.to(output_dtype)
