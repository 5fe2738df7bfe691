"""Checks of a plan for a float8 model, and the borders that activations and gradients cross in float8."""

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
    """Check that `plan` can split the converted modules; return the crossings by plan key.

    Only regions and heads that contain converted modules have a crossing (`split.converted.Crossing`).

    Args:
        plan: the resolved plan; its model need not contain converted modules.
        backend: the backend of the TP group; None if it is not known yet.

    Raises:
        PlanError: a module can't be split. The message names the module, its sizes, and a remedy.
    """
    _check_sizes(plan)
    _check_torchao_styles(plan, backend)
    return _crossings(plan)


def check_gather(
    model: nn.Module, plan: ResolvedPlan | None, converted: Collection[str], shards: int, options: Float8
) -> None:
    """Check that FSDP2 shards each converted weight evenly, since it pads uneven shards only in high precision.

    Args:
        plan: the tensor-parallel plan, whose shards FSDP2 shards again; None: no tensor parallelism.
        converted: names of the converted modules.
        shards: number of ranks that FSDP2 shards over.
        options: the options that the error names.

    Raises:
        OptionError: the number of rows of a weight is not a multiple of `shards`.
    """
    layouts = {} if plan is None else {entry.key: entry.layouts.get("weight") for entry in plan.entries}
    for name in converted:
        rows, layout = int(model.get_submodule(name).out_features), layouts.get(name)  # type: ignore[arg-type]
        is_split = layout is not None and layout.placement.is_shard(0)
        if is_split and plan is not None:
            rows //= plan.degree
        if rows % shards:
            works = either([n for n in range(1, shards) if rows % n == 0])
            raise options.error(
                "enable_fsdp_float8_all_gather",
                f"the weight of {name} has {rows} rows{' on a tensor-parallel rank' * is_split}, which {shards} ranks do "
                "not divide, and FSDP2 gathers only equal shards in float8: add "
                f"'{_end_of(name)}' to filter_fqns, or set data_parallel_shard_degree to {works}",
            )


def _check_sizes(plan: ResolvedPlan) -> None:
    """Refuse a degree at which a rank's shard of a converted module is not a multiple of `ALIGNMENT`.

    Also refuse a replicated module whose input is not as wide as the residual stream, such as a feature map that is applied
    to each head. A rank calls such a module with its own heads only, and their scale differs from the scale of all heads.
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
                f"{key} (Float8Linear, {module.in_features} in, {module.out_features} out): its input does not have the "
                f"hidden size {width}, so a rank may pass only its own heads, "
                f"whose float8 scale differs from the scale of all heads: "
                f"leave it out of float8 (filter '{_end_of(key)}')"
            )
        for side, size, suits in _sizes(style, module):
            if suits(degree):
                continue
            works = [d for d in range(2, degree) if suits(d)]
            instead = f", or set tensor_parallel_degree to {either(works)}" if works else ""
            raise PlanError(
                f"{key} (Float8Linear, {module.in_features} in, {module.out_features} out): tensor_parallel_degree = "
                f"{degree} does not split its {size} {side} into multiples of {ALIGNMENT}, which float8 products need: "
                f"leave it out of float8 (filter '{_end_of(key)}'){instead}"
            )


def _end_of(key: str) -> str:
    """Return the last component of `key`, for a filter; if it is an index in a list, with the component before it."""
    names = key.split(".")
    return ".".join(names[-2:] if names[-1].isdecimal() else names[-1:])


def _sizes(style: Style, module: Any) -> Iterator[tuple[str, int, Callable[[int], bool]]]:
    """Yield the sharded side of the weight ("inputs" or "outputs"), its size, and whether a degree splits it into aligned
    shards."""
    operands = style.operands(1)
    if operands is not None and (operands.outputs or operands.inputs):
        side, size = ("outputs", module.out_features) if operands.outputs else ("inputs", module.in_features)
        yield side, size, lambda d: not size % (d // style.operands(d).replicas * ALIGNMENT)  # type: ignore[union-attr]


def _check_torchao_styles(plan: ResolvedPlan, backend: str | None) -> None:
    """Refuse torchao's float8 styles where they would be wrong, or fail.

    torchao checks that scales are dynamic, but not that each tensor has one scale, so its check accepts the rowwise recipes.
    """
    recipe = plan.source.options.float8
    for key, style in plan.styles.items():
        if type(style).__module__ != "torchao.float8.float8_tensor_parallel":
            continue
        module = plan.module_at(key)
        converted = any(map(is_float8, module.modules()))
        for is_wrong, why in (
            (not converted, "the module is not converted to float8: convert the model first"),
            (
                recipe != "tensorwise",
                f"it gathers with one scale per tensor, and the recipe is {recipe}: use tensorwise",
            ),
            (backend == "gloo", "it gathers in float8, which gloo does not support: use NCCL"),
        ):
            if is_wrong:
                reason = f"{why}; or use the styles of titanplans, which work with any recipe and backend"
                raise PlanError(reason, key=key, style=style, module=module)


def _crossings(plan: ResolvedPlan) -> dict[str, Crossing]:
    recipe = plan.source.options.float8
    if recipe == "none":
        return {}
    crossings: dict[str, Crossing] = {}
    for entry in plan.entries:
        style = entry.style
        enters = style.opens or style.makes_logits
        if not (style.closes or enters):
            continue
        inside = [e for e in plan.entries if e.key == entry.key or e.key.startswith(f"{entry.key}.")]
        linears = [e for e in inside if isinstance(e.module, nn.Linear)]
        if not any(is_float8(e.module) for e in linears):
            continue
        output_linears = [e for e in linears if e.style.makes_partial_sum]
        why_plain = plain_border(entry.module)
        if recipe != "tensorwise":
            why_plain = f"{recipe} scales the tensors of each product along different dimensions, so each module casts"
        crossing: dict[Any, str | None] = {}
        if enters:
            crossing["activations"] = why_plain or _why_activations_plain(
                style, [e for e in linears if e not in output_linears]
            )
        if style.closes:
            crossing["gradients"] = why_plain or _why_gradients_plain(style, inside, output_linears)
        crossings[entry.key] = crossing
    return crossings


def _why_activations_plain(style: Style, input_linears: list[Entry]) -> str | None:
    """Return the reason why activations enter a region in high precision; None if they enter in float8."""
    if not style.float8_input:
        return "the plan says that code other than the projections uses the input (float8_input = False)"
    return _why_not_float8(input_linears, "uses the input, too")


def _why_gradients_plain(style: Style, inside: list[Entry], output_linears: list[Entry]) -> str | None:
    """Return the reason why gradients of a region's output are in high precision; None if they are in float8."""
    biased = [e.key for e in output_linears if style.opens and e.module.bias is not None]
    others = [e.key for e in inside if e.style.makes_partial_sum and not isinstance(e.module, nn.Linear)]
    if biased:
        return f"the gradient of the bias of {biased[0]} is a sum of these gradients"
    return _why_not_float8(output_linears, "computes the output") or (
        f"{others[0]} is not a Linear, and computes the output" if others else None
    )


def _why_not_float8(entries: list[Entry], role: str) -> str | None:
    """Return the reason why not all of `entries`, Linear modules, accept a float8 tensor; None if they do."""
    for entry in entries:
        if not is_float8(entry.module):
            return f"{entry.key} is not converted, and {role}"
    adapted = [entry.key for entry in entries if is_adapted(entry.module)]
    return f"the adapter of {adapted[0]} is not converted, and {role}" if adapted else None
