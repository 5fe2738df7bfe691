"""Check that the degrees divide the sizes of a model: head counts, sharded dimensions, the number of experts."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import Shard

from titanplans.errors import PlanError, either, near_multiples
from titanplans.plan.plan import TPPlan
from titanplans.plan.resolve import Entry, ResolvedPlan
from titanplans.split.decoder import within
from titanplans.split.layout import Layout, next_multiple, shard_size
from titanplans.styles.base import direct_parameters

_DEGREES = 256
"""The largest degree that an error suggests."""


class Size(NamedTuple):
    """A size that limits which degrees are possible, usually because the degree has to divide it."""

    name: str
    value: int
    location: str
    suits: Callable[[int], bool]
    """Whether a degree is possible with this size."""
    fault: str = "does not divide"
    remedies: str = ""
    """Remedies other than another degree."""


def check_degree(plan: ResolvedPlan, dtype: torch.dtype | None) -> None:
    """Refuse a tensor-parallel degree that does not suit every size.

    Args:
        plan: resolved.
        dtype: dtype of the weights in products. None: the parameters' dtype.

    Raises:
        PlanError: names the size and the degrees that suit all sizes.
    """
    _check(
        plan,
        plan.degree,
        [*_head_counts(plan, plan.degree), *_shard_sizes(plan), *_widths_of_experts(plan, dtype)],
    )


def check_heads(plan: ResolvedPlan) -> None:
    """Refuse a product tp x cp that does not suit the sizes that mixers split by heads.

    Raises:
        PlanError: names the size and the products that suit all sizes.
    """
    degree = plan.source.options.degrees.tp_cp
    in_mixers = [entry for entry in plan.entries if plan.token_region_of(entry) is not None]
    sizes = [size for entry in in_mixers for size in _sizes_of(entry, entry.head_layouts, degree, even=True)]
    _check(plan, degree, [*_head_counts(plan, degree), *sizes])


def _check(plan: ResolvedPlan, degree: int, sizes: list[Size]) -> None:
    for size in sizes:
        if not size.suits(degree):
            largest = max(s.value for s in sizes)
            works = [d for d in range(1, min(largest, _DEGREES) + 1) if all(s.suits(d) for s in sizes)]
            words = plan.source.options.name_degree(degree)
            raise PlanError(
                f"{words} {size.fault} {size.name} = {size.value} ({size.location}): "
                f"{'a product of ' if ' x ' in words else ''}{either(works)} would work{size.remedies}"
            )


def _head_counts(plan: ResolvedPlan, degree: int) -> Iterator[Size]:
    """Yield the head counts of the split mixers; they are checked first, because their errors are the clearest."""
    for name, mixer in plan.decoder.mixers.items():
        if plan.split_key(name) is not None:
            shared = any(entry.style.shares_heads for entry in plan.within(name))
            yield from _heads(
                plan.source.plan_of(mixer), mixer, f"{name}, {type(mixer).__name__}", degree, shared=shared
            )


def _shard_sizes(plan: ResolvedPlan) -> Iterator[Size]:
    """Yield every sharded dimension."""
    regions = [entry.key for entry in plan.entries if entry.style.opens]
    equal = [key for key in regions if any(entry.style.needs_equal_shards for entry in plan.within(key))]
    for entry in plan.entries:
        if not entry.style.splits_by_experts:  # `check_experts` checks these
            in_mixer = plan.decoder.mixer_around(entry.key) is not None
            even = in_mixer or any(within(entry.key, region) for region in equal)
            yield from _sizes_of(entry, entry.layouts, plan.degree, even=even)


def _sizes_of(entry: Entry, layouts: Mapping[str, Layout], degree: int, *, even: bool) -> Iterator[Size]:
    """Yield the sizes of one entry.

    If `even` is True, the degree must divide them, because in a mixer a shard is a number of complete heads, and a norm over
    a split width needs equal slices. Otherwise shards may be uneven, as long as no rank's is empty.
    """
    location = f"{entry.key}, {type(entry.module).__name__}"
    for size_name, (value, shared) in entry.style.sizes().items():
        if even or shared:
            yield Size(
                size_name, value, location, partial(_divides_either_way if shared else _divides, value)
            )
        else:
            yield _uneven(size_name, value, location, degree)
    for name, layout in layouts.items():
        if not isinstance(layout.placement, Shard):
            continue
        value = getattr(entry.module, name).shape[layout.placement.dim]
        size_name = f"dimension {layout.placement.dim} of {name}"
        if even or layout.rows is not None:
            yield Size(size_name, value, location, partial(_divides, value))
        else:
            yield _uneven(size_name, value, location, degree)


def _widths_of_experts(plan: ResolvedPlan, dtype: torch.dtype | None) -> Iterator[Size]:
    """Yield the width of stacked experts that are multiplied by torch's grouped_mm, as transformers does by default.

    grouped_mm needs rows of a multiple of 16 bytes, and does not take float64.
    """
    implementations: Any = getattr(plan.model, "get_experts_implementation", dict)()
    if "grouped_mm" not in implementations.values():
        return
    for entry in plan.entries:
        style, module, parameter = entry.style, entry.module, entry.parameter
        # Experts with a choice of implementations in transformers have this attribute.
        if parameter is None or not style.makes_partial_sum or not hasattr(module, "is_transposed"):
            continue
        weight = module._parameters[parameter]
        assert weight is not None
        if (size := (dtype or weight.dtype).itemsize) > 4:
            continue
        dim = entry.layouts[parameter].placement.dim  # type: ignore[attr-defined]
        width = weight.shape[dim]
        yield Size(
            f"dimension {dim} of {parameter}",
            width,
            f"{entry.key}, {type(module).__name__}",
            partial(_fills_rows, width, 16 // size),
            f"leaves a rank with rows in {str(dtype or weight.dtype).removeprefix('torch.')} that are not a multiple of "
            "16 bytes, which grouped_mm refuses, in its shard of",
            f", or a width of {next_multiple(width, plan.degree * 16 // size)}, or "
            'model.set_experts_implementation("batched_mm")',
        )


def _heads(plan: TPPlan, mixer: nn.Module, location: str, degree: int, *, shared: bool) -> Iterator[Size]:
    for name, count in plan.heads(mixer).items():
        if name in plan.shared_head_names and shared:
            remedies = f", or {name} = {either([n for n in range(1, degree + 1) if degree % n == 0])}"
            yield Size(name, count, location, partial(_divides_either_way, count), remedies=remedies)
        else:
            remedies = f", or {name} = {near_multiples(count, degree)}"
            if name in plan.shared_head_names:
                remedies += ", or kv_colwise() in place of colwise() for keys and values"
            yield Size(name, count, location, partial(_divides, count), remedies=remedies)


def _uneven(size_name: str, value: int, location: str, degree: int) -> Size:
    remedies = f", or a size of {next_multiple(value, degree)}"
    return Size(
        size_name,
        value,
        location,
        partial(_fills_all_ranks, value),
        "leaves a rank with an empty shard of",
        remedies,
    )


def _divides(value: int, degree: int) -> bool:
    return value % degree == 0


def _divides_either_way(value: int, degree: int) -> bool:
    return value % degree == 0 or degree % value == 0


def _fills_rows(width: int, elements: int, degree: int) -> bool:
    """Whether every rank's slice of `width` is a multiple of `elements`; True if one rank has all of it."""
    return degree == 1 or shard_size(width, degree) % elements == width % elements == 0


def _fills_all_ranks(value: int, degree: int) -> bool:
    """Whether no rank's shard of `value` is empty."""
    return shard_size(value, shard_size(value, degree)) == degree


def check_experts(plan: ResolvedPlan) -> None:
    """Refuse an expert-parallel degree that does not suit the experts of the model, or the other degrees.

    Raises:
        PlanError: there are no experts, or the degree does not divide their number, or is not a multiple of `tp`.
    """
    options = plan.source.options
    if options.degrees.ep == 1:
        return
    label = f"expert_parallel_degree = {options.degrees.ep}"
    entries = [entry for entry in plan.entries if entry.style.splits_by_experts]
    if not entries:
        raise PlanError(
            f"{label}: {type(plan.source).__name__} splits no experts of {type(plan.model).__name__}; set it to 1"
        )
    if options.degrees.ep % options.degrees.tp:
        raise PlanError(
            f"{label} is not a multiple of tensor_parallel_degree = {options.degrees.tp}, whose ranks have the same "
            f"tokens: set it to {options.degrees.tp}, or tensor_parallel_degree to {either(_divisors(options.degrees.ep))}"
        )
    for entry in entries:
        count = len(next(iter(direct_parameters(entry.module).values())))
        if count % options.degrees.ep:
            works = [d for d in _divisors(count) if d % options.degrees.tp == 0]
            set_both = f"set both it and tensor_parallel_degree to {either(_divisors(count))}"
            remedy = f"{either(works)} would work" if works else set_both
            raise PlanError(
                f"{label} does not divide the number of experts = {count} ({entry.key}, {type(entry.module).__name__}): "
                f"{remedy}"
            )


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]
