"""Whether the degrees suit a plan and its model: heads, every dimension that is sharded, and the number of experts."""

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
"""The largest degree that an error proposes."""


class Size(NamedTuple):
    """Something that the degree has to suit."""

    what: str
    value: int
    where: str
    suits: Callable[[int], bool]
    """Whether a degree would do."""
    fault: str = "does not divide"
    also: str = ""
    """The remedies other than another degree."""


def check_degree(plan: ResolvedPlan, dtype: torch.dtype | None) -> None:
    """Refuse a degree of tensor parallelism that does not suit every size.

    Args:
        plan: resolved.
        dtype: that of weights in products; None: their own.

    Raises:
        PlanError: names the size and the degrees that suit all sizes.
    """
    _check(
        plan,
        plan.degree,
        [*_head_counts(plan, plan.degree), *_shard_sizes(plan), *_widths_of_experts(plan, dtype)],
    )


def check_heads(plan: ResolvedPlan) -> None:
    """Refuse a product of the degrees of tensor and context parallelism that does not suit what mixers split by heads.

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
                f"{words} {size.fault} {size.what} = {size.value} ({size.where}): "
                f"{'a product of ' if ' x ' in words else ''}{either(works)} would work{size.also}"
            )


def _head_counts(plan: ResolvedPlan, degree: int) -> Iterator[Size]:
    """Yield the head counts of the mixers that are split; they come first, since they say most."""
    for name, mixer in plan.decoder.mixers.items():
        if plan.split_key(name) is not None:
            shared = any(entry.style.shares_heads for entry in plan.within(name))
            yield from _heads(
                plan.source.plan_of(mixer), mixer, f"{name}, {type(mixer).__name__}", degree, shared=shared
            )


def _shard_sizes(plan: ResolvedPlan) -> Iterator[Size]:
    """Yield every dimension that is sharded."""
    regions = [entry.key for entry in plan.entries if entry.style.opens]
    equal = [key for key in regions if any(entry.style.needs_equal_shards for entry in plan.within(key))]
    for entry in plan.entries:
        if not entry.style.splits_by_experts:  # `check_experts`
            in_mixer = plan.decoder.mixer_around(entry.key) is not None
            even = in_mixer or any(within(entry.key, region) for region in equal)
            yield from _sizes_of(entry, entry.layouts, plan.degree, even=even)


def _sizes_of(entry: Entry, layouts: Mapping[str, Layout], degree: int, *, even: bool) -> Iterator[Size]:
    """Yield the sizes of one entry.

    In a mixer shards are complete heads, and a norm over a split width takes as much of it on each rank: there shards are
    `even`, and the degree must divide. Elsewhere they may be uneven, as long as every rank holds something.
    """
    where = f"{entry.key}, {type(entry.module).__name__}"
    for what, (value, shared) in entry.style.sizes().items():
        if even or shared:
            yield Size(what, value, where, partial(_divides_either_way if shared else _divides, value))
        else:
            yield _filled(what, value, where, degree)
    for name, layout in layouts.items():
        if not isinstance(layout.placement, Shard):
            continue
        value = getattr(entry.module, name).shape[layout.placement.dim]
        what = f"dimension {layout.placement.dim} of {name}"
        if even or layout.rows is not None:
            yield Size(what, value, where, partial(_divides, value))
        else:
            yield _filled(what, value, where, degree)


def _widths_of_experts(plan: ResolvedPlan, dtype: torch.dtype | None) -> Iterator[Size]:
    """Yield the width of stacked experts that are multiplied by torch's grouped_mm, as transformers does by default.

    It takes rows of a multiple of 16 bytes. There is none of float64.
    """
    asked: Any = getattr(plan.model, "get_experts_implementation", dict)()
    if "grouped_mm" not in asked.values():
        return
    for entry in plan.entries:
        style, module, parameter = entry.style, entry.module, entry.parameter
        # Experts that transformers multiplies in a way of one's choice have this attribute.
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
            f"leaves a rank with rows in {str(dtype or weight.dtype).removeprefix('torch.')} that are no multiple of 16 "
            "bytes, as grouped_mm needs, of",
            f", or a width of {next_multiple(width, plan.degree * 16 // size)}, or "
            'model.set_experts_implementation("batched_mm")',
        )


def _heads(plan: TPPlan, mixer: nn.Module, where: str, degree: int, *, shared: bool) -> Iterator[Size]:
    for name, count in plan.heads(mixer).items():
        if name in plan.shared_head_names and shared:
            also = f", or {name} = {either([n for n in range(1, degree + 1) if degree % n == 0])}"
            yield Size(name, count, where, partial(_divides_either_way, count), also=also)
        else:
            also = f", or {name} = {near_multiples(count, degree)}"
            if name in plan.shared_head_names:
                also += ", or kv_colwise() where colwise() splits keys and values"
            yield Size(name, count, where, partial(_divides, count), also=also)


def _filled(what: str, value: int, where: str, degree: int) -> Size:
    also = f", or a size of {next_multiple(value, degree)}"
    return Size(what, value, where, partial(_fills, value), "leaves a rank without a share of", also)


def _divides(value: int, degree: int) -> bool:
    return value % degree == 0


def _divides_either_way(value: int, degree: int) -> bool:
    return value % degree == 0 or degree % value == 0


def _fills_rows(width: int, numbers: int, degree: int) -> bool:
    """Whether every rank has a multiple of so many `numbers` of `width`, or all of it."""
    return degree == 1 or shard_size(width, degree) % numbers == width % numbers == 0


def _fills(value: int, degree: int) -> bool:
    """Whether every rank would hold something of `value`."""
    return shard_size(value, shard_size(value, degree)) == degree


def check_experts(plan: ResolvedPlan) -> None:
    """Refuse a degree of expert parallelism that does not suit the experts of the model, or the other degrees.

    Raises:
        PlanError: there are no experts, or the degree does not divide their number, or is no multiple of `tp`.
    """
    options = plan.source.options
    if options.degrees.ep == 1:
        return
    words = f"expert_parallel_degree = {options.degrees.ep}"
    found = [entry for entry in plan.entries if entry.style.splits_by_experts]
    if not found:
        raise PlanError(
            f"{words}: {type(plan.source).__name__} gives no experts of {type(plan.model).__name__} to ranks; set it to 1"
        )
    if options.degrees.ep % options.degrees.tp:
        raise PlanError(
            f"{words} is no multiple of tensor_parallel_degree = {options.degrees.tp}, whose ranks have the same tokens: "
            f"set it to {options.degrees.tp}, or tensor_parallel_degree to {either(_divisors(options.degrees.ep))}"
        )
    for entry in found:
        number = len(next(iter(direct_parameters(entry.module).values())))
        if number % options.degrees.ep:
            works = [d for d in _divisors(number) if d % options.degrees.tp == 0]
            both = f"set both it and tensor_parallel_degree to {either(_divisors(number))}"
            remedy = f"{either(works)} would work" if works else both
            raise PlanError(
                f"{words} does not divide the number of experts = {number} ({entry.key}, {type(entry.module).__name__}): "
                f"{remedy}"
            )


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]
