"""Find how a region can be split, from gradients alone: `probe`.

1. Output projections: weights whose row k alone determines feature k of the output, which is affine in it.
2. Reach: with only some input columns of one output projection kept, the gradient of a random cotangent is nonzero exactly
   in the parameters that these columns depend on. Meanwhile the statistics of norms are held constant.
3. Units: the columns are divided into as many equal groups as possible, so that the rows of every parameter are used by the
   units in order, see `sections`.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from titanplans.derive.region import (
    ModuleCall,
    RecordedRegion,
    float_tensors,
    record_calls,
    walk_float_arguments,
)
from titanplans.derive.sections import Section, find_sections
from titanplans.split.decoder import join
from titanplans.torch_private.dispatch import tree_map_only

MAX_UNITS = 16
"""More units than this are not told apart: a region that can be split over more ranks is split in groups of units."""

ARGUMENT, BUFFER = "argument ", "buffer "
"""Prefixes that tell the names of arguments and buffers from those of parameters."""


class NotDerived(Exception):
    """A region whose split is not found. The message says why."""


@dataclass(frozen=True)
class Norm:
    """A module that mixes the last dimension of its input and has no matrix: a norm over `group` of `width` features."""

    width: int
    group: int

    @property
    def groups(self) -> int:
        return self.width // self.group


@dataclass(frozen=True)
class OutputProjection:
    """The dimensions of a weight that computes the region's output."""

    outputs: int
    inputs: int


@dataclass(frozen=True)
class RegionLayout:
    """How a region is split over a number of units.

    Attributes:
        sharded: the dimension and the sections of each parameter, argument or buffer of which units use different rows.
    """

    sharded: Mapping[str, tuple[int, list[Section]]]

    def sections_of_norm(self, name: str, width: int, units: int) -> list[Section]:
        """Return the sections of a norm's width: those of its parameters, or even slices if it has none."""
        own = (sections for key, (_, sections) in self.sharded.items() if key.rpartition(".")[0] == name)
        return next(own, [Section(width, units)])


@dataclass
class Findings:
    """What `probe` found in a region.

    Attributes:
        region: the region that was probed.
        outputs: the region's output projections by the names of their weights.
        summands: names of parameters that are added to the output, such as biases.
        inner_sums: names of Linear modules in the region whose outputs all ranks need, summed over the ranks.
        norms: the region's norms by name.
        calls: the first call of each module in the region.
        leaves: the tensors whose gradients are computed: parameters, buffers and arguments by name.
        layouts: the possible layouts by their number of units.
        without_outputs: the region's output if the output projections and the summands are zero.
    """

    region: RecordedRegion
    outputs: dict[str, OutputProjection]
    summands: list[str]
    inner_sums: tuple[str, ...]
    norms: dict[str, Norm]
    calls: dict[str, ModuleCall]
    leaves: dict[str, torch.Tensor]
    layouts: dict[int, RegionLayout] = field(default_factory=dict)
    without_outputs: torch.Tensor = field(default_factory=lambda: torch.zeros(()))

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.region.module.named_parameters())

    @property
    def output_widths(self) -> list[int]:
        """The number of input columns of each output projection."""
        return [self.parameters[name].shape[output.inputs] for name, output in self.outputs.items()]

    def sharded_size(self) -> int:
        """Return the number of elements of parameters that the best layout shards."""
        if not self.layouts:
            return 0
        best = max(self.layouts.values(), key=lambda layout: len(layout.sharded))
        return sum(p.numel() for name, p in self.parameters.items() if name in best.sharded)


def probe(region: RecordedRegion) -> Findings:
    """Return how `region` can be split.

    A Linear in the region is treated as an inner sum if more parameters can then be sharded.

    Raises:
        NotDerived: it has no output projection, or no number of units gives every parameter a layout.
    """
    best = _probe(region, ())
    widths = best.output_widths
    for name, module in region.module.named_modules():
        call = best.calls.get(name)
        if not isinstance(module, nn.Linear) or call is None or not call.args:
            continue
        reads_stream = torch.equal(call.args[0], region.hidden_states)
        if module.in_features in widths and join(name, "weight") not in best.outputs and not reads_stream:
            other = _probe(region, (name,))
            best = max(best, other, key=Findings.sharded_size)
    if not best.layouts:
        raise NotDerived(f"no parameter is used in parts by the inputs of {', '.join(best.outputs)}")
    return best


def _probe(region: RecordedRegion, inner_sums: tuple[str, ...]) -> Findings:
    module = region.module
    for parameter in module.parameters():
        parameter.requires_grad_(True)
    leaves: dict[str, torch.Tensor] = dict(module.named_parameters())
    leaves |= _float_arguments_as_leaves(region)
    for name, buffer in module.named_buffers():
        if buffer.is_floating_point() and buffer.numel() > 1:
            leaves[BUFFER + name] = buffer.requires_grad_(True)
    calls = record_calls(module, region.run)
    candidates = _diagonal(region)
    outputs, summands = _outputs_and_summands(region, candidates)
    if not outputs:
        raise NotDerived(
            "its output is not that of a projection: each feature depends on several rows of a weight, for example "
            "because a norm follows the projection"
        )
    findings = Findings(region, outputs, summands, inner_sums, _norms(module, calls), calls, leaves)
    with _zeroed(region, [*outputs, *summands]):
        findings.without_outputs = region.run().detach()
    reach = _reach(findings)
    for units in range(MAX_UNITS, 1, -1):
        if any(_groups(findings, name) % units for name in outputs):
            continue
        layout = _layout(findings, reach, units)
        if layout is not None and any(name in findings.parameters for name in layout.sharded):
            findings.layouts[units] = layout
    return findings


def _float_arguments_as_leaves(region: RecordedRegion) -> dict[str, torch.Tensor]:
    """Let gradients reach the arguments that are not the hidden states; return them by name and position."""
    leaves: dict[str, torch.Tensor] = {}

    def change(name: str, x: torch.Tensor) -> torch.Tensor:
        if name != region.hidden and x.is_floating_point():
            x = x.detach().clone().requires_grad_()
            leaves[f"{ARGUMENT}{name} {len(leaves)}"] = x
        return x

    region.call.args, region.call.kwargs = region.arguments(change)
    return leaves


def float_argument_names(region: RecordedRegion) -> list[str]:
    """Return the names that the region's arguments have in `Findings.leaves`, in the order in which they are passed."""
    return [f"{ARGUMENT}{name} {index}" for index, (name, _) in enumerate(walk_float_arguments(region))]


def _diagonal(region: RecordedRegion) -> dict[str, int]:
    """Return the parameters whose row k alone determines feature k of the output, affinely, with the rows' dimension."""
    parameters = dict(region.module.named_parameters())
    hidden_size = region.run().shape[-1]
    found: dict[tuple[str, int], int] = {}
    features = (3 % hidden_size, hidden_size // 2 + 1)
    for feature in features:
        y = region.run()
        weights = torch.randn(y.shape[:-1], generator=torch.Generator().manual_seed(feature), dtype=y.dtype)
        gradients = torch.autograd.grad(
            (y[..., feature] * weights).sum(), list(parameters.values()), allow_unused=True
        )
        for (name, parameter), gradient in zip(parameters.items(), gradients, strict=True):
            for dim in range(parameter.ndim):
                if gradient is None or parameter.shape[dim] != hidden_size:
                    continue
                if _used(gradient, dim).nonzero().flatten().tolist() == [feature]:
                    found[name, dim] = found.get((name, dim), 0) + 1
    return {
        name: dim
        for (name, dim), count in found.items()
        if count == len(features) and _is_affine(region, parameters[name])
    }


def _used(gradient: torch.Tensor, dim: int) -> torch.Tensor:
    """Return for each index of a dimension whether the gradient is nonzero there."""
    hit = (gradient != 0).transpose(0, dim)
    return hit if hit.ndim == 1 else hit.flatten(1).any(1)


def _is_affine(region: RecordedRegion, parameter: nn.Parameter) -> bool:
    """Return whether the region's output is affine in `parameter`, from its values times 0, 1 and 2."""
    with torch.no_grad():
        value, outputs = parameter.clone(), []
        for factor in (0, 1, 2):
            parameter.copy_(factor * value)
            outputs.append(region.run())
        parameter.copy_(value)
    at_0, at_1, at_2 = outputs
    return torch.allclose(at_2 - at_1, at_1 - at_0, rtol=1e-7, atol=1e-9 * float(at_1.abs().max()))


def _outputs_and_summands(
    region: RecordedRegion, diagonal: Mapping[str, int]
) -> tuple[dict[str, OutputProjection], list[str]]:
    parameters = dict(region.module.named_parameters())
    outputs: dict[str, OutputProjection] = {}
    summands = []
    for name, dim in diagonal.items():
        ndim, owner = parameters[name].ndim, name.rpartition(".")[0]
        # Stacked experts may have a bias [experts, hidden] next to a weight of three dimensions.
        has_weight = any(
            o.rpartition(".")[0] == owner and parameters[o].ndim > ndim for o in diagonal if o != name
        )
        if ndim == 1 or has_weight:
            summands.append(name)
        else:
            inputs = next(i for i in reversed(range(ndim)) if i != dim and (ndim == 2 or i > 0))
            outputs[name] = OutputProjection(dim, inputs)
    # The output is also affine in its factors, such as a layer scale; but these change nothing if the projections are zero.
    with _zeroed(region, outputs), torch.no_grad():
        before = region.run()
        for name in list(summands):
            with _zeroed(region, [name]):
                if torch.equal(region.run(), before):
                    summands.remove(name)
    return outputs, summands


@contextmanager
def _zeroed(
    region: RecordedRegion, names: Iterator[str] | Sequence[str] | Mapping[str, Any]
) -> Iterator[None]:
    parameters = dict(region.module.named_parameters())
    values = {name: parameters[name].detach().clone() for name in names}
    with torch.no_grad():
        for name in values:
            parameters[name].zero_()
    try:
        yield
    finally:
        with torch.no_grad():
            for name, value in values.items():
                parameters[name].copy_(value)


def _norms(module: nn.Module, calls: Mapping[str, ModuleCall]) -> dict[str, Norm]:
    """Return the modules without matrices whose output has their input's shape and mixes its last dimension."""
    norms = {}
    for name, inner in module.named_modules():
        call = calls.get(name)
        if not name or call is None or any(p.ndim > 1 for p in inner.parameters()):
            continue
        output = call.output
        if not isinstance(output, torch.Tensor) or output.ndim < 2:
            continue
        inputs = [x for x in float_tensors((call.args, call.kwargs)) if x.shape == output.shape]
        if not inputs:
            continue
        leaves = [x.clone().requires_grad_() for x in inputs]
        y = inner(*with_inputs(call.args, inputs, leaves), **with_inputs(call.kwargs, inputs, leaves))
        gradients = torch.autograd.grad(y[..., y.shape[-1] // 3].sum(), leaves, allow_unused=True)
        mixed = torch.zeros(y.shape[-1], dtype=torch.bool)
        for gradient in gradients:
            if gradient is not None:
                mixed |= (gradient != 0).flatten(0, -2).any(0)
        if mixed.sum() > 1:
            norms[name] = Norm(y.shape[-1], int(mixed.sum()))
    return norms


def with_inputs(values: Any, inputs: Sequence[torch.Tensor], replacements: Sequence[torch.Tensor]) -> Any:
    """Return nested `values` with each tensor of `inputs` replaced by the one at its position in `replacements`."""
    by_id = {id(x): replacement for x, replacement in zip(inputs, replacements, strict=True)}
    return tree_map_only(torch.Tensor, lambda x: by_id.get(id(x), x), values)


@contextmanager
def linearised(findings: Findings, *, except_norm: str | None = None) -> Iterator[None]:
    """Within the context, hold the statistics of norms constant, and let no gradient pass through inner sums.

    The outputs stay the same: a norm becomes input x (output / input), with the quotient detached.
    """

    def detached(value: Any) -> Any:
        return tree_map_only(torch.Tensor, torch.Tensor.detach, value)

    def cut(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return detached(args), kwargs

    def hold(norm: nn.Module, args: Any, kwargs: Any, output: torch.Tensor) -> torch.Tensor:
        result = norm.forward(*detached(args), **detached(kwargs))
        for x in float_tensors((args, kwargs)):
            if x.requires_grad and x.shape == output.shape:
                factor = torch.where(x == 0, torch.ones_like(x), output / x).detach()
                result = result + (x * factor - (x * factor).detach())
        return result

    module = findings.region.module
    handles = [
        module.get_submodule(name).register_forward_pre_hook(cut, with_kwargs=True)
        for name in findings.inner_sums
    ]
    handles += [
        module.get_submodule(name).register_forward_hook(hold, with_kwargs=True)
        for name in findings.norms
        if name != except_norm
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


Mask = torch.Tensor | None
"""Which elements of a tensor are reached; None: none of them."""


def _groups(findings: Findings, output: str) -> int:
    columns = findings.parameters[output].shape[findings.outputs[output].inputs]
    return max(count for count in range(1, MAX_UNITS + 1) if columns % count == 0)


def _reach(findings: Findings) -> dict[str, dict[str, list[Mask]]]:
    """Return for each leaf and output projection which elements of the leaf each group of columns reaches."""
    reach: dict[str, dict[str, list[Mask]]] = {}
    for output, projection in findings.outputs.items():
        columns = findings.parameters[output].shape[projection.inputs]
        groups = _groups(findings, output)
        for group in range(groups):
            first, end = group * columns // groups, (group + 1) * columns // groups
            with linearised(findings):
                masks = reached_from(findings, output, first, end)
            for name, mask in masks.items():
                reach.setdefault(name, {}).setdefault(output, []).append(mask)
    return reach


def reached_from(findings: Findings, output: str, first: int, end: int) -> dict[str, Mask]:
    """Return which elements of each leaf the columns from `first` to `end` of an output projection depend on."""
    region, projection, parameters = findings.region, findings.outputs[output], findings.parameters
    others = [name for name in (*findings.outputs, *findings.summands) if name != output]
    weight, value = parameters[output], parameters[output].detach().clone()
    names = [name for name in findings.leaves if name != output]
    if not names:
        return {}
    with _zeroed(region, others):
        with torch.no_grad():
            weight.zero_()
            kept = slice(first, end)
            weight.transpose(0, projection.inputs)[kept] = value.transpose(0, projection.inputs)[kept]
        y = region.run()
        cotangent = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=y.dtype)
        leaves = [findings.leaves[name] for name in names]
        gradients = torch.autograd.grad((y * cotangent).sum(), leaves, allow_unused=True)
        with torch.no_grad():
            weight.copy_(value)
    return {name: None if g is None else g != 0 for name, g in zip(names, gradients, strict=True)}


def _layout(
    findings: Findings, reach: Mapping[str, Mapping[str, list[Mask]]], units: int
) -> RegionLayout | None:
    """Return the layout for this number of units; None if a leaf has none."""
    sharded: dict[str, tuple[int, list[Section]]] = {}
    for name, by_output in reach.items():
        if name in findings.outputs or name in findings.summands:
            continue
        users = [found for masks in by_output.values() if (found := _users(masks, units)) is not None]
        if not any(users):
            continue  # no unit uses it, or all of them use all of it
        choices = [
            next(
                ((dim, sections) for dim, rows in dims.items() if (sections := find_sections(rows, units))),
                None,
            )
            for dims in users
        ]
        # No layout if one output projection uses the full leaf and another one a slice, or if two use different slices.
        if choices[0] is None or any(choice != choices[0] for choice in choices):
            return None
        sharded[name] = choices[0]
    return RegionLayout(sharded)


def _users(masks: Sequence[Mask], units: int) -> dict[int, list[frozenset[int]]] | None:
    """Return which units use each row, for every dimension along which units use different rows; None: no unit uses any."""
    if all(mask is None or not mask.any() for mask in masks):
        return None
    some = next(mask for mask in masks if mask is not None)
    filled = [torch.zeros_like(some) if mask is None else mask for mask in masks]
    per_unit = len(filled) // units
    by_unit = [torch.stack(filled[unit * per_unit : (unit + 1) * per_unit]).any(0) for unit in range(units)]
    dims = {}
    for dim in range(some.ndim):
        rows = torch.stack([_used(mask, dim) for mask in by_unit])
        if not bool((rows == rows.any(0)).all()):
            dims[dim] = [frozenset(column.nonzero().flatten().tolist()) for column in rows.T]
    return dims
