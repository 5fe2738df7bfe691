"""Find which attributes of a region's code count its units, by running its code on one rank's slices: `find_counts`.

The code runs once for each rank, with that rank's slices of the parameters and its own values of some attributes. The right
attributes are those with which the ranks' outputs sum to the output of the unsplit region.
"""

import copy
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from titanplans.derive.probe import BUFFER, Findings, NotDerived, RegionLayout, float_argument_names
from titanplans.derive.region import return_constant
from titanplans.derive.sections import Section, local_rows
from titanplans.plan.plan import QUERIES_PER_GROUP
from titanplans.split.decoder import join
from titanplans.split.local_code import set_attributes

_TOLERANCE = 1e-9
"""Largest difference of the ranks' sum from the output, relative to the largest element. The sums are in float64."""
ERRORS = (RuntimeError, ValueError, TypeError, IndexError, AssertionError, ZeroDivisionError)
"""What code may raise when it gets slices of its parameters, and counts that do not fit these slices."""
_MOST_RUNS = 300
"""The most sets of attributes that are tried for a region; then the region is not derived."""


@dataclass(frozen=True)
class SlicedRegion:
    """How a region is split: a layout, its number of units, and the norms whose statistics cover several units' features."""

    findings: Findings
    units: int
    split_norms: Sequence[str] = ()

    @property
    def layout(self) -> RegionLayout:
        return self.findings.layouts[self.units]

    def output_sum(self, ranks: int, counts: Mapping[str, int]) -> torch.Tensor:
        """Return the sum over the ranks of the region's output.

        Args:
            ranks: the number of ranks, which divides the number of units.
            counts: the attributes that are set on every rank, by dotted name.

        Raises:
            One of `ERRORS`: the region's code does not run with these counts.
        """
        total: Any = 0
        for rank in range(ranks):
            total = total + self._output_of_rank(rank, ranks, counts)
        # What the region returns without its projections, such as its own input, would be counted once per rank.
        return total - (ranks - 1) * self.findings.without_outputs

    def _output_of_rank(self, rank: int, ranks: int, counts: Mapping[str, int]) -> torch.Tensor:
        found, region = self.findings, self.findings.region
        module = copy.deepcopy(region.module)
        tensors = dict(module.named_parameters()) | {BUFFER + name: b for name, b in module.named_buffers()}

        def local(x: torch.Tensor, dim: int, sections: Sequence[Section]) -> torch.Tensor:
            return x.detach().index_select(dim, torch.tensor(local_rows(sections, rank, ranks)))

        for name, (dim, sections) in self.layout.sharded.items():
            if name in tensors:
                set_tensor(module, name, local(tensors[name], dim, sections))
        for name, output in found.outputs.items():
            width = tensors[name].shape[output.inputs] // ranks
            set_tensor(module, name, tensors[name].detach().narrow(output.inputs, rank * width, width))
        for name in found.summands:
            set_tensor(module, name, tensors[name].detach() / ranks)
        for name in self.split_norms:
            output = found.calls[name].output
            sections = self.layout.sections_of_norm(name, output.shape[-1], self.units)
            return_constant(module.get_submodule(name), local(output, output.ndim - 1, sections))
        for name in found.inner_sums:
            return_constant(module.get_submodule(name), found.calls[name].output)
        set_attributes(module, counts)
        names = iter(float_argument_names(region))

        def change(name: str, x: torch.Tensor) -> torch.Tensor:
            if name == region.hidden or not x.is_floating_point():
                return x
            layout = self.layout.sharded.get(next(names))
            return x if layout is None else local(x, *layout)

        with torch.no_grad():
            return region.run(module, change)


def set_tensor(module: nn.Module, name: str, value: torch.Tensor) -> None:
    """Replace a parameter of `module`, or a buffer, whose name has the prefix `BUFFER`."""
    owner, _, last = name.removeprefix(BUFFER).rpartition(".")
    if name.startswith(BUFFER):
        module.get_submodule(owner).register_buffer(last, value)
    else:
        setattr(module.get_submodule(owner), last, nn.Parameter(value.contiguous()))


def read_integers(module: nn.Module, run: Callable[[nn.Module], Any]) -> dict[str, int]:
    """Return the integer attributes above 1 that the code of a module reads while `run` calls a copy, by dotted name.

    Attributes of its modules and of their configs: `num_heads`, `config.num_attention_heads`, `conv.groups`.
    """
    found: dict[str, int] = {}
    module = copy.deepcopy(module)
    for name, inner in module.named_modules():
        if isinstance(inner, nn.Linear):
            continue
        config = inner.__dict__.get("config")
        if config is not None:
            inner.__dict__["config"] = config = copy.copy(config)
            _record_reads(
                config, lambda key, value, name=name: found.setdefault(join(name, "config", key), value)
            )
        _record_reads(inner, lambda key, value, name=name: found.setdefault(join(name, key), value))
    with torch.no_grad():
        run(module)
    return found


def _record_reads(holder: Any, record: Callable[[str, int], Any]) -> None:
    """Let `holder` call `record` with name and value, when an integer attribute of it is read."""
    cls = type(holder)

    def __getattribute__(self: Any, key: str) -> Any:
        value = cls.__getattribute__(self, key)  # pyrefly: ignore[bad-argument-count]
        if type(value) is int and value > 1 and not key.startswith("_"):
            record(key, value)
        return value

    holder.__class__ = type(
        cls.__name__, (cls,), {"__getattribute__": __getattribute__, "__module__": cls.__module__}
    )


@dataclass(frozen=True)
class Counts:
    """Attributes that have to count a rank's units or rows.

    Attributes:
        values: the attributes' values in the unsplit region, by dotted name.
        parts: the sections whose rows an attribute counts, if it counts rows of several sections.
        shared: attributes that count shared heads, or rows of shared heads, with the number of these heads. If there are
            fewer shared heads than ranks, several ranks use the same head.
    """

    values: Mapping[str, int]
    parts: Mapping[str, Sequence[Section]]
    shared: Mapping[str, int] = field(default_factory=dict)

    def local(self, ranks: int) -> dict[str, int]:
        """Return the values on one of `ranks` ranks."""
        return {name: self._local(name, value, ranks) for name, value in self.values.items()}

    def _local(self, name: str, value: int, ranks: int) -> int:
        if name in self.parts:
            return sum(len(section.local(0, ranks)) for section in self.parts[name])
        return (
            value // self.shared[name] * max(1, self.shared[name] // ranks)
            if name in self.shared
            else value // ranks
        )


def find_counts(split: SlicedRegion, ranks: int = 2) -> Counts:
    """Return the fewest attributes that have to be divided for `ranks` ranks.

    Raises:
        NotDerived: with no choice of attributes do the ranks' outputs sum to the output of the unsplit module.
    """
    region, sizes, parts = split.findings.region, _sizes(split), _sums_of_sections(split)
    expected = region.run().detach()
    candidates = {
        name: value
        for name, value in read_integers(region.module, region.run).items()
        if (value in sizes and value % ranks == 0) or value in parts
    }
    reason, runs = "", 0

    def chosen(names: Iterable[str]) -> Counts:
        values = {name: candidates[name] for name in names}
        return Counts(values, {name: parts[value] for name, value in values.items() if value in parts})

    def is_right(names: Iterable[str]) -> bool:
        nonlocal reason, runs
        runs += 1
        try:
            total = split.output_sum(ranks, chosen(names).local(ranks))
        except ERRORS as error:
            reason = f"{type(error).__name__}: {str(error)[:150]}"
            return False
        if total.shape != expected.shape:
            reason = f"the output has shape {tuple(total.shape)}, not {tuple(expected.shape)}"
            return False
        difference = _difference(total, expected)
        reason = f"the ranks' sum is off by {difference:.1e}"
        return difference <= _TOLERANCE

    if is_right(()):
        return chosen(())
    if is_right(candidates):
        names = list(candidates)
        for name in candidates:
            fewer = [other for other in names if other != name]
            names = fewer if is_right(fewer) else names
        return chosen(names)
    for size in range(1, len(candidates)):
        for names in itertools.combinations(candidates, size):
            if runs < _MOST_RUNS and is_right(names):
                return chosen(names)
    listed = ", ".join(f"{name} = {value}" for name, value in candidates.items()) or "none"
    raise NotDerived(
        f"no choice of its integer attributes ({listed}), divided by the number of ranks, lets the ranks' outputs sum to "
        f"the output of the unsplit module: {reason}"
    )


def find_shared_counts(split: SlicedRegion, counts: Counts, heads: int) -> dict[str, int]:
    """Return which of `counts` count the `heads` shared heads, or rows of these heads, with the number of heads.

    With these attributes the sum is right for twice as many ranks as heads, where two ranks share each head.

    Raises:
        NotDerived: with no such choice do the ranks' outputs sum to the output of the unsplit module.
    """
    region, ranks = split.findings.region, 2 * heads
    if split.units % ranks:
        return {}
    expected = region.run().detach()
    queries = {name: split.units // ranks for name in QUERIES_PER_GROUP if hasattr(region.module, name)}
    names = [name for name, value in counts.values.items() if value % heads == 0 and name not in counts.parts]
    for size in range(len(names) + 1):
        for chosen in itertools.combinations(names, size):
            shared = replace(counts, shared=dict.fromkeys(chosen, heads))
            try:
                total = split.output_sum(ranks, queries | shared.local(ranks))
            except ERRORS:
                continue
            if total.shape == expected.shape and _difference(total, expected) < _TOLERANCE:
                return dict(shared.shared)
    raise NotDerived(
        f"no choice of its integer attributes lets the outputs of {ranks} ranks, of which two share each of {heads} heads, "
        "sum to the output of the unsplit module"
    )


def _difference(total: torch.Tensor, expected: torch.Tensor) -> float:
    return float((total - expected).abs().max()) / float(expected.abs().max())


def _sizes(split: SlicedRegion) -> set[int]:
    """Return the numbers that an attribute of the code may count: units, rows of sections, offsets, widths."""
    found, sizes = split.findings, {split.units}
    for name, (dim, sections) in split.layout.sharded.items():
        if name in found.parameters:
            sizes.add(found.parameters[name].shape[dim])
        sizes |= {size for section in sections if section.slices > 1 for size in section}
        sizes |= set(itertools.accumulate(section.rows for section in sections))
    sizes |= {found.parameters[name].shape[output.inputs] for name, output in found.outputs.items()}
    return sizes


def _sums_of_sections(split: SlicedRegion) -> dict[int, Sequence[Section]]:
    """Return runs of consecutive sections with different numbers of slices, by the total of their rows."""
    sums: dict[int, Sequence[Section]] = {}
    for _, sections in split.layout.sharded.values():
        for first, end in itertools.combinations(range(len(sections) + 1), 2):
            part = sections[first:end]
            if len({section.slices for section in part}) > 1:
                sums.setdefault(sum(section.rows for section in part), part)
    return sums
