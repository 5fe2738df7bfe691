"""Whether the degrees suit a plan and its model: heads, every dimension that is sharded, and the number of experts."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import Shard

from titanplans.errors import PlanError, either, near_multiples
from titanplans.plan.layout import shard_size
from titanplans.plan.plan import TPPlan
from titanplans.plan.resolve import ResolvedPlan
from titanplans.plan.styles.base import held
from titanplans.plan.styles.experts import ByExpert
from titanplans.plan.styles.projections import Rowwise

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
    """Refuse a degree that does not suit every size, with the degrees that do; `dtype` is that of weights in products."""
    degree = plan.degree
    in_mixers = plan.source.options.in_mixers
    sizes = [*_sizes(plan)] if in_mixers else [*_sizes(plan), *_widths_of_experts(plan, dtype)]
    for size in sizes:
        if not size.suits(degree):
            largest = max(s.value for s in sizes)
            works = [d for d in range(1, min(largest, _DEGREES) + 1) if all(s.suits(d) for s in sizes)]
            raise PlanError(
                f"{plan.source.options.words} {size.fault} {size.what} = {size.value} ({size.where}): "
                f"{'a product of ' if len(plan.source.options.words.split(' x ')) > 2 else ''}{either(works)} would "
                f"work{size.also}"
            )


def _sizes(plan: ResolvedPlan) -> Iterator[Size]:
    """Yield heads first, since they say most, then every sharded dimension.

    Inside a token mixer shards are whole heads, so the degree must divide. Elsewhere they may be
    uneven, as long as every rank holds something.
    """
    decoder, degree = plan.decoder, plan.degree
    for name, mixer in decoder.mixers.items():
        if plan.split_key(name) is not None:
            shared = any(entry.style.shares_heads for entry in plan.within(name))
            yield from _heads(plan.source.plan_of(mixer), mixer, f"{name}, {type(mixer).__name__}", shared)
    for entry in plan.entries:
        key, style, _, module, _, layouts = entry
        if isinstance(style, ByExpert):  # `check_experts`
            continue
        in_mixer = decoder.mixer_around(key) is not None
        if plan.source.options.in_mixers:
            in_mixer = plan.token_region_of(entry) is not None
            if not in_mixer:
                continue
        where = f"{key}, {type(module).__name__}"
        for what, (value, shared) in style.sizes().items():
            if in_mixer or shared:
                yield Size(what, value, where, partial(_divides_either_way if shared else _divides, value))
            else:
                yield _filled(what, value, where, degree)
        for name, layout in layouts.items():
            if not isinstance(layout.placement, Shard):
                continue
            value = getattr(module, name).shape[layout.placement.dim]
            what = f"dimension {layout.placement.dim} of {name}"
            if in_mixer or layout.rows is not None:
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
    for key, style, _, module, parameter, _ in plan.entries:
        # Experts that transformers multiplies in a way of one's choice have this attribute.
        if parameter is None or not isinstance(style, Rowwise) or not hasattr(module, "is_transposed"):
            continue
        weight = module._parameters[parameter]
        assert weight is not None
        if (size := (dtype or weight.dtype).itemsize) > 4:
            continue
        width = weight.shape[style.dim]
        yield Size(
            f"dimension {style.dim} of {parameter}",
            width,
            f"{key}, {type(module).__name__}",
            partial(_fills_rows, width, 16 // size),
            f"leaves a rank with rows in {str(dtype or weight.dtype).removeprefix('torch.')} that are no multiple of 16 "
            "bytes, as grouped_mm needs, of",
            f", or a width of {_next_multiple(width, plan.degree * 16 // size)}, or "
            'model.set_experts_implementation("batched_mm")',
        )


def _heads(plan: TPPlan, mixer: nn.Module, where: str, shared: bool) -> Iterator[Size]:
    degree = plan.options.degree
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
    also = f", or a size of {_next_multiple(value, degree)}"
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


def _next_multiple(value: int, factor: int) -> int:
    return shard_size(value, factor) * factor


def check_experts(plan: ResolvedPlan) -> None:
    """Refuse a degree of expert parallelism that does not suit the experts of the model, or the other degrees.

    Raises:
        PlanError: there are no experts, or the degree does not divide their number, or is no multiple of `tp`.
    """
    options = plan.source.options
    if options.degrees.ep == 1:
        return
    words = f"expert_parallel_degree = {options.degrees.ep}"
    found = [entry for entry in plan.entries if isinstance(entry.style, ByExpert)]
    if not found:
        raise PlanError(
            f"{words}: {type(plan.source).__name__} gives no experts of {type(plan.model).__name__} to ranks; set it to 1"
        )
    if options.degrees.ep % options.degree:
        raise PlanError(
            f"{words} is no multiple of tensor_parallel_degree = {options.degree}, whose ranks have the same tokens: set it "
            f"to {options.degree}, or tensor_parallel_degree to {either(_divisors(options.degrees.ep))}"
        )
    for entry in found:
        number = len(next(iter(held(entry.module).values())))
        if number % options.degrees.ep:
            works = [d for d in _divisors(number) if d % options.degree == 0]
            both = f"set both it and tensor_parallel_degree to {either(_divisors(number))}"
            remedy = f"{either(works)} would work" if works else both
            raise PlanError(
                f"{words} does not divide the number of experts = {number} ({entry.key}, {type(entry.module).__name__}): "
                f"{remedy}"
            )


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]
