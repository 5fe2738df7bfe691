"""Find the norms of a region whose statistics cover features of several units: `find_split_norms`."""

from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.nn.functional import silu

from titanplans.derive.probe import Findings, Mask, Norm, RegionLayout, linearised, reached_from, with_inputs
from titanplans.derive.region import float_tensors


class SplitNormKind(NamedTuple):
    """How a norm over the features of several units is computed.

    Attributes:
        style: "split_norm" for a root-mean-square norm, whose statistic is summed over the ranks; "gathered_in_region"
            for any other norm.
        gate: for a norm with a gate: whether the gate is multiplied "before" the norm or "after" it; None: no gate.
        groups: number of norms side by side.
    """

    style: Literal["split_norm", "gathered_in_region"]
    gate: Literal["before", "after"] | None
    groups: int


def find_split_norms(findings: Findings, units: int) -> dict[str, SplitNormKind]:
    """Return by name the norms that normalise features of several units together.

    If the statistics of such a norm are not held constant, the output of one unit depends on parameters of other units.
    """
    layout = findings.layouts[units]
    return {
        name: _kind(findings, name, norm)
        for name, norm in findings.norms.items()
        if not _is_per_unit(findings, layout, name) and _joins_units(findings, name, units)
    }


def _is_per_unit(findings: Findings, layout: RegionLayout, name: str) -> bool:
    """Return whether the norm normalises each unit separately: all units use all of its parameters."""
    own = [key for key in findings.parameters if key.rpartition(".")[0] == name]
    return bool(own) and all(key not in layout.sharded for key in own)


def _joins_units(findings: Findings, name: str, units: int) -> bool:
    for output, projection in findings.outputs.items():
        columns = findings.parameters[output].shape[projection.inputs] // units
        with linearised(findings):
            held = reached_from(findings, output, 0, columns)
        with linearised(findings, except_norm=name):
            free = reached_from(findings, output, 0, columns)
        if any(_exceeds(free[key], held[key]) for key in free if key in findings.parameters):
            return True
    return False


def _exceeds(mask: Mask, other: Mask) -> bool:
    return mask is not None and (other is None or bool((mask & ~other).any()))


def _kind(findings: Findings, name: str, norm: Norm) -> SplitNormKind:
    module, call = findings.region.module.get_submodule(name), findings.calls[name]
    groups = norm.width // norm.group
    inputs = [x for x in float_tensors((call.args, call.kwargs)) if x.shape == call.output.shape]

    def output(*replacements: torch.Tensor) -> Any:
        with torch.no_grad():
            return module(
                *with_inputs(call.args, inputs, replacements),
                **with_inputs(call.kwargs, inputs, replacements),
            )

    if len(inputs) == 1:
        # A norm that subtracts the mean does not change if a constant is added to its input.
        subtracts_mean = torch.allclose(output(inputs[0] + 0.37), call.output, rtol=1e-6)
        return SplitNormKind("gathered_in_region" if subtracts_mean else "split_norm", None, groups)
    x, gate = inputs[:2]
    weight = getattr(module, "weight", torch.ones(norm.width, dtype=x.dtype)).detach()
    formulas: dict[Literal["before", "after"], torch.Tensor] = {
        "before": weight * _rms_norm(x * silu(gate), groups, _epsilon(module)),
        "after": weight * _rms_norm(x, groups, _epsilon(module)) * silu(gate),
    }
    for place, value in formulas.items():
        if torch.allclose(value, call.output, rtol=1e-5, atol=1e-8):
            return SplitNormKind("split_norm", place, groups)
    return SplitNormKind("gathered_in_region", None, groups)


def _rms_norm(x: torch.Tensor, groups: int, epsilon: float) -> torch.Tensor:
    grouped = x.unflatten(-1, (groups, -1))
    return (grouped * torch.rsqrt(grouped.pow(2).mean(-1, keepdim=True) + epsilon)).flatten(-2)


def _epsilon(module: nn.Module) -> float:
    names = ("eps", "variance_epsilon", "epsilon", "norm_eps")
    return next((getattr(module, name) for name in names if hasattr(module, name)), 0.0)
