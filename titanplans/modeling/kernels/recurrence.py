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
from titanplans.modeling.kernels.packing import Result, by_sequence
from titanplans.modeling.kernels.precision import accumulation_dtype
from titanplans.proof.modes import Widen

_OVER_TIME = ("q", "k", "v", "g", "gk", "beta")
_HEADS_FIRST = ("delta_rule_recurrence",)
"""References of [B, H, T, ...]; all others are of [B, T, H, ...], as the kernels are."""
_WITHOUT_EFFECT = ("cu_seqlens_cpu", "chunk_indices", "chunk_size")
"""How a kernel splits its work."""


def recurrence(kernel: Callable[..., Any], reference: str) -> Callable[..., Result]:
    """Return a function with the arguments of `kernel` that computes by the `reference`, "fla.ops.delta_rule.naive:f".

    Inputs are [B, T, H, ...]; states are [N, H, K, V] (or [N, H, V, K] with `state_v_first`), N the number of packed
    sequences, or B. The output has the dtype of v, the final state that of the accumulation. Torch differentiates it.

    The function raises:
        KernelError: an argument that the reference has not, by name.
    """
    module, _, name = reference.partition(":")
    signature = inspect.signature(kernel)

    @torch.compiler.disable  # as FLA's kernels are; and a compiler would unroll the loop
    @functools.wraps(kernel)
    def compute(*args: Any, **kwargs: Any) -> Result:
        given = signature.bind(*args, **kwargs).arguments
        given |= given.pop("kwargs", {})
        given = {key: value for key, value in given.items() if value is not None and value is not False}
        naive = getattr(importlib.import_module(module), name)
        return _compute(kernel.__name__, naive, given)

    return compute


def _compute(kernel: str, naive: Callable[..., Any], given: dict[str, Any]) -> Result:
    """`given` are the arguments that were, by name, without those that are None or False."""
    dtype = accumulation_dtype(*(value for value in given.values() if isinstance(value, torch.Tensor)))
    out_dtype = given["v"].dtype
    with torch.autocast(given["v"].device.type, enabled=False):
        inputs = {name: given.pop(name).to(dtype) for name in _OVER_TIME if name in given}
        _before_the_recurrence(inputs, given)
        bounds, state = given.pop("cu_seqlens", None), given.pop("initial_state", None)
        v_first, reverse = given.pop("state_v_first", False), given.pop("reverse", False)
        has = inspect.signature(naive).parameters
        if "g" in has and "g" not in inputs:
            inputs["g"] = inputs["v"].new_zeros(inputs["v"].shape[:3])  # no decay
        if "scale" in given and "scale" not in has:  # then it is K ** -0.5
            inputs["q"] = inputs["q"] * (given.pop("scale") * inputs["q"].shape[-1] ** 0.5)
        options = {name: value for name, value in given.items() if name not in _WITHOUT_EFFECT}
        asked = [*inputs, *options, *(["initial_state"] if state is not None else [])]
        if unknown := [name for name in asked if name not in has]:
            raise KernelError(
                f"{kernel}: {unknown[0]} is not computed on a CPU: {naive.__module__}.{naive.__name__}, FLA's own "
                "reference, has no such argument; leave it out or run on a GPU"
            )
        if "output_final_state" in has:
            options.setdefault("output_final_state", False)
        if state is not None:
            state = (state.transpose(-1, -2) if v_first else state).to(dtype)

        def run(part: dict[str, torch.Tensor], state: torch.Tensor | None) -> Result:
            # From the last token to the first, and [B, H, T, ...], and back.
            flip = (lambda x: x.flip(1)) if reverse else (lambda x: x)
            swap = (lambda x: x.transpose(1, 2)) if naive.__name__ in _HEADS_FIRST else (lambda x: x)
            part = {name: swap(flip(x)) for name, x in part.items()}
            with Widen(dtype):
                o, final = naive(**part, **options, **({} if state is None else {"initial_state": state}))
            return flip(swap(o)), final

        o, final = by_sequence(run, inputs, state, bounds)
    return o.to(out_dtype), final.transpose(-1, -2).contiguous() if v_first and final is not None else final


def _before_the_recurrence(inputs: dict[str, torch.Tensor], given: dict[str, Any]) -> None:
    """What kernels do to `inputs` on request; the requests are taken out of `given`."""
    if given.pop("use_qk_l2norm_in_kernel", False):
        inputs["q"], inputs["k"] = l2norm(inputs["q"]), l2norm(inputs["k"])
    if given.pop("use_beta_sigmoid_in_kernel", False):
        inputs["beta"] = inputs["beta"].sigmoid() * (2.0 if given.pop("allow_neg_eigval", False) else 1.0)
    if given.pop("use_gate_in_kernel", False):
        g = inputs["g"]  # [B, T, H], or [B, T, H, K]
        rate = given.pop("A_log").to(g.dtype).exp().view(-1, *[1] * (g.dim() - 3))
        bias = given.pop("dt_bias", None)
        inputs["g"] = -rate * F.softplus(g if bias is None else g + bias.to(g.dtype).view(g.shape[2:]))
    if (decay := given.pop("g_gamma", None)) is not None:  # one for each head
        inputs["g"] = decay.to(inputs["v"].dtype).expand(inputs["v"].shape[:3])
    groups = inputs["v"].shape[2] // inputs["q"].shape[2]
    if groups > 1:  # several heads of values for one of queries and keys
        inputs["q"], inputs["k"] = (inputs[name].repeat_interleave(groups, 2) for name in "qk")
