"""Float8 under a plan: sizes that a rank can multiply, and which borders the sequence crosses in float8."""

from collections.abc import Callable, Collection, Iterator
from typing import Any, cast

from torch import nn

from titanplans.config import Float8
from titanplans.errors import PlanError, either
from titanplans.plan.resolve import Entry, ResolvedPlan
from titanplans.split.adapted import is_adapted
from titanplans.split.converted import (
    ALIGNMENT,
    Crossing,
    is_float8,
    plain_border,
)
from titanplans.styles.base import Style


def check_float8(plan: ResolvedPlan, backend: str | None = None) -> dict[str, Crossing]:
    """Refuse what float8 can't be split as; return how a sequence crosses each border with converted modules, by plan key.

    Args:
        plan: resolved; nothing of its model needs to be converted.
        backend: that of the TP group; None if it is not known yet.

    Raises:
        PlanError: names the module, its sizes, and what would work.
    """
    _check_sizes(plan)
    _check_torchao_styles(plan, backend)
    return _crossings(plan)


def check_gather(
    model: nn.Module, plan: ResolvedPlan | None, converted: Collection[str], shards: int, options: Float8
) -> None:
    """Refuse converted weights that FSDP2 can't gather in float8: it pads an uneven shard in high precision alone.

    Args:
        plan: of tensor parallelism, which FSDP2 shards the shards of; None where nothing is split.
        converted: names of modules.
        shards: the number of ranks that FSDP2 shards over.
        options: what to blame.

    Raises:
        OptionError: names the first module whose rows the ranks do not divide.
    """
    layouts = {} if plan is None else {entry.key: entry.layouts.get("weight") for entry in plan.entries}
    for name in converted:
        rows, layout = int(model.get_submodule(name).out_features), layouts.get(name)  # type: ignore[arg-type]
        split = layout is not None and layout.placement.is_shard(0)
        if split and plan is not None:
            rows //= plan.degree
        if rows % shards:
            works = either([n for n in range(1, shards) if rows % n == 0])
            raise options.error(
                "enable_fsdp_float8_all_gather",
                f"{name} has {rows} rows{' on a tensor-parallel rank' * split}, and FSDP2 gathers only equal shards in "
                f"float8, which {shards} ranks do not have: leave it out by filter_fqns ('{_end_of(name)}'), or set "
                f"data_parallel_shard_degree to {works}",
            )


def _check_sizes(plan: ResolvedPlan) -> None:
    """Refuse a degree at which a rank's share of a converted module is not aligned for float8.

    And a replicated module in a region that does not read the sequence: a feature map of each head, say, whose scale is that
    of all heads, and whose gradients are no summands.
    """
    embedding, degree = plan.decoder.embedding, plan.degree
    width = None if embedding is None else plan.module_at(embedding).weight.shape[-1]  # type: ignore[union-attr]
    for entry in plan.entries:
        key, style, module = entry.key, entry.style, cast("Any", entry.module)
        if not is_float8(module):
            continue
        operands = style.operands(degree)
        replicated = operands is not None and not (operands.outputs or operands.inputs)
        if replicated and width not in (None, module.in_features):
            raise PlanError(
                f"{key} (Float8Linear, {module.in_features} in, {module.out_features} out): its input is no sequence of "
                f"width {width}, so a rank may give it some of the heads alone, whose float8 scale differs from that of all "
                f"heads: leave it out of float8 (filter '{_end_of(key)}')"
            )
        for side, size, suits in _sizes(style, module):
            if suits(degree):
                continue
            works = [d for d in range(2, degree) if suits(d)]
            instead = f", or set tensor_parallel_degree to {either(works)}" if works else ""
            raise PlanError(
                f"{key} (Float8Linear, {module.in_features} in, {module.out_features} out): tensor_parallel_degree = "
                f"{degree} does not split its {size} {side} into multiples of {ALIGNMENT}, as float8 products need: "
                f"leave it out of float8 (filter '{_end_of(key)}'){instead}"
            )


def _end_of(key: str) -> str:
    """Return the last part of `key` for a filter; of an item of a list, the last two."""
    parts = key.split(".")
    return ".".join(parts[-2:] if parts[-1].isdecimal() else parts[-1:])


def _sizes(style: Style, module: Any) -> Iterator[tuple[str, int, Callable[[int], bool]]]:
    """Yield what the degree splits: the side, its size, and whether a degree gives aligned shares of it."""
    operands = style.operands(1)
    if operands is not None and (operands.outputs or operands.inputs):
        side, size = ("outputs", module.out_features) if operands.outputs else ("inputs", module.in_features)
        yield side, size, lambda d: not size % (d // style.operands(d).replicas * ALIGNMENT)  # type: ignore[union-attr]


def _check_torchao_styles(plan: ResolvedPlan, backend: str | None) -> None:
    """Refuse torchao's own float8 styles where they would be wrong, or fail.

    They check that scales are dynamic, but not that a tensor has one scale, so the rowwise recipes pass their check.
    """
    recipe = plan.source.options.float8
    for key, style in plan.styles.items():
        if type(style).__module__ != "torchao.float8.float8_tensor_parallel":
            continue
        module = plan.module_at(key)
        converted = any(map(is_float8, module.modules()))
        for wrong, why in (
            (not converted, "the module is not converted to float8: convert the model first"),
            (
                recipe != "tensorwise",
                f"it gathers with one scale a tensor, and the recipe is {recipe}: take tensorwise",
            ),
            (backend == "gloo", "it gathers in float8, which gloo can't: use NCCL"),
        ):
            if wrong:
                reason = f"{why}; or use this project's styles, which work for any recipe and backend"
                raise PlanError(reason, key=key, style=style, module=module)


def _crossings(plan: ResolvedPlan) -> dict[str, Crossing]:
    recipe = plan.source.options.float8
    if recipe == "none":
        return {}
    found: dict[str, Crossing] = {}
    for entry in plan.entries:
        style = entry.style
        enters = style.opens or style.makes_logits
        if not (style.closes or enters):
            continue
        inside = [e for e in plan.entries if e.key == entry.key or e.key.startswith(f"{entry.key}.")]
        linears = [e for e in inside if isinstance(e.module, nn.Linear)]
        if not any(is_float8(e.module) for e in linears):
            continue
        last = [e for e in linears if e.style.makes_partial_sum]
        plain = plain_border(entry.module)
        if recipe != "tensorwise":
            plain = f"{recipe} scales the tensors of each product along other dimensions: cast in each module"
        crossing: dict[Any, str | None] = {}
        if enters:
            crossing["activations"] = plain or _why_enters_plainly(
                style, [e for e in linears if e not in last]
            )
        if style.closes:
            crossing["gradients"] = plain or _why_leaves_plainly(style, inside, last)
        found[entry.key] = crossing
    return found


def _why_enters_plainly(style: Style, first: list[Entry]) -> str | None:
    """Return why the input enters in high precision; None if it enters in float8."""
    if not style.float8_input:
        return "the plan says that something else reads it, too (float8_input = False)"
    return _why_plain(first, "reads it too")


def _why_leaves_plainly(style: Style, inside: list[Entry], last: list[Entry]) -> str | None:
    """Return why the gradient of an output comes back in high precision; None if it comes in float8."""
    biased = [e.key for e in last if style.opens and e.module.bias is not None]
    others = [e.key for e in inside if e.style.makes_partial_sum and not isinstance(e.module, nn.Linear)]
    if biased:
        return f"the bias of {biased[0]} sums them, too"
    return _why_plain(last, "gives it") or (f"{others[0]} is no Linear, and gives it" if others else None)


def _why_plain(entries: list[Entry], what: str) -> str | None:
    """Return why not all of `entries`, Linear modules, can take a float8 tensor; None if they can."""
    for entry in entries:
        if not is_float8(entry.module):
            return f"{entry.key} is not converted, and {what}"
    adapted = [entry.key for entry in entries if is_adapted(entry.module)]
    return f"the adapter of {adapted[0]} is not converted, and {what}" if adapted else None
