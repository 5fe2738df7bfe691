"""Find the norms of a region whose statistics cover features of several units: `find_split_norms`."""

import copy
import itertools
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.nn.functional import silu

from titanplans.derive.counts import ERRORS, read_integers, set_tensor
from titanplans.derive.probe import Findings, Mask, Norm, RegionLayout, linearised, reached_from, with_inputs
from titanplans.derive.region import float_tensors
from titanplans.derive.sections import local_rows
from titanplans.split.local_code import set_attributes

NormCount = Literal["groups", "width", "width of a group"]
"""What an attribute of a norm's code counts."""


class SplitNormKind(NamedTuple):
    """How a norm over the features of several units is computed.

    Attributes:
        style: "split_norm" for a root-mean-square norm, whose statistic is summed over the ranks; "gathered_in_region"
            for any other norm.
        gate: for a norm with a gate: whether the gate is multiplied "before" the norm or "after" it; None: no gate.
        groups: number of groups into which the width is divided; each group is normalised separately.
        counts: what attributes of the norm's code count, by name. A rank sets them to the values of its slice.
    """

    style: Literal["split_norm", "gathered_in_region"]
    gate: Literal["before", "after"] | None
    groups: int
    counts: Mapping[str, NormCount] = MappingProxyType({})


def find_split_norms(findings: Findings, units: int) -> dict[str, SplitNormKind]:
    """Return by name the norms that normalise features of several units together.

    If the statistics of such a norm are not held constant, the output of one unit depends on parameters of other units.
    """
    layout = findings.layouts[units]
    return {
        name: _with_counts(findings, name, _kind(findings, name, norm), units)
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
    groups = norm.groups
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


def _with_counts(findings: Findings, name: str, kind: SplitNormKind, units: int) -> SplitNormKind:
    """Return the kind with the fewest counts that make the norm's code right on a rank's slice, for any number of ranks.

    Without such counts the norm is gathered.
    """
    if kind.style == "gathered_in_region":
        return kind
    module, call = findings.region.module.get_submodule(name), findings.calls[name]
    values = read_integers(module, lambda copied: copied(*call.args, **call.kwargs))
    meanings = [
        (attribute, meaning)
        for attribute, value in values.items()
        for meaning, counted in _counted(findings.norms[name], 1).items()
        if counted == value
    ]
    degrees = [
        ranks
        for ranks in range(2, units + 1)
        if units % ranks == 0 and (kind.groups % ranks == 0 or ranks % kind.groups == 0)
    ]
    for size in range(len(values) + 1):
        for chosen in itertools.combinations(meanings, size):
            counts = dict(chosen)
            if len(counts) == size and all(
                _is_right(findings, name, kind._replace(counts=counts), units, ranks) for ranks in degrees
            ):
                return kind._replace(counts=counts)
    return SplitNormKind("gathered_in_region", None, kind.groups)


def _counted(norm: Norm, ranks: int) -> dict[NormCount, int]:
    """Return the counts on one of `ranks` ranks."""
    width, groups = norm.width // ranks, max(1, norm.groups // ranks)
    return {"groups": groups, "width of a group": width // groups, "width": width}


def _is_right(findings: Findings, name: str, kind: SplitNormKind, units: int, ranks: int) -> bool:
    """Return whether the norm's code, run on each rank's slice and scaled as `split_norm` does, returns the full output."""
    module, call = copy.deepcopy(findings.region.module.get_submodule(name)), findings.calls[name]
    layout, epsilon = findings.layouts[units], _epsilon(module)
    if (bias := dict(module.named_parameters()).get("bias")) is not None:
        nn.init.zeros_(bias)  # `split_norm` adds it after the scaling
    sections = layout.sections_of_norm(name, findings.norms[name].width, units)
    inputs = [x for x in float_tensors((call.args, call.kwargs)) if x.shape == call.output.shape]
    normed = inputs[0] * silu(inputs[1]) if kind.gate == "before" else inputs[0]
    rows = [torch.tensor(local_rows(sections, rank, ranks)) for rank in range(ranks)]
    squares = [normed[..., own].square().mean(-1, keepdim=True) + epsilon for own in rows]

    def output(local: nn.Module, *slices: torch.Tensor) -> torch.Tensor:
        return local(*with_inputs(call.args, inputs, slices), **with_inputs(call.kwargs, inputs, slices))

    def outputs_of_ranks() -> Iterator[torch.Tensor]:
        ranks_per_group = max(1, ranks // kind.groups)
        for rank, own in enumerate(rows):
            local = copy.deepcopy(module)
            for key, parameter in module.named_parameters():
                if (owned := layout.sharded.get(f"{name}.{key}")) is not None:
                    set_tensor(local, key, parameter.detach().index_select(owned[0], own))
            if isinstance(local, nn.RMSNorm):
                local.normalized_shape = (len(own),)
            counted = _counted(findings.norms[name], ranks)
            set_attributes(local, {attribute: counted[meaning] for attribute, meaning in kind.counts.items()})
            first = rank // ranks_per_group * ranks_per_group
            square = sum(squares[first : first + ranks_per_group]) / ranks_per_group
            yield output(local, *(x[..., own] for x in inputs)) * (squares[rank] / square).sqrt()

    with torch.no_grad():
        full = output(module, *inputs)
        try:
            return all(
                torch.allclose(local, full[..., own], rtol=1e-6, atol=1e-9)
                for local, own in zip(outputs_of_ranks(), rows, strict=True)
            )
        except ERRORS:
            return False


def _rms_norm(x: torch.Tensor, groups: int, epsilon: float) -> torch.Tensor:
    grouped = x.unflatten(-1, (groups, -1))
    return (grouped * torch.rsqrt(grouped.pow(2).mean(-1, keepdim=True) + epsilon)).flatten(-2)


def _epsilon(module: nn.Module) -> float:
    names = ("eps", "variance_epsilon", "epsilon", "norm_eps")
    return next((getattr(module, name) for name in names if hasattr(module, name)), 0.0)
