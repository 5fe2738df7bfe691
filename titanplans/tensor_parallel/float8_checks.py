"""Float8 under a plan: sizes that a rank can multiply, and which borders the sequence crosses in float8."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from titanplans.errors import PlanError, either
from titanplans.tensor_parallel.decoder import find_decoder
from titanplans.tensor_parallel.float8 import (
    ALIGNMENT,
    Crossing,
    float8_linears,
    is_float8,
    plain_border,
    recipe_of,
)
from titanplans.tensor_parallel.low_rank import is_adapted
from titanplans.tensor_parallel.projections import Colwise, KVColwise, Rowwise, RowwiseInRegion
from titanplans.tensor_parallel.replicated import ReplicatedInRegion
from titanplans.tensor_parallel.styles import Region, target
from titanplans.tensor_parallel.vocab import VocabHead


def check_float8(plan: Mapping[str, ParallelStyle], model: nn.Module, degree: int) -> None:
    """Refuse a degree at which a rank's share of a converted module is not aligned for float8.

    And a replicated module in a region that does not read the sequence: a feature map of each head, say, whose scale is that
    of all heads, and whose gradients are no summands.

    Raises:
        PlanError: naming the module, its sizes, and what would work.
    """
    converted = float8_linears(model)
    embedding = find_decoder(model, required=False).embedding if converted else None
    width = None if embedding is None else target(embedding, model).module.weight.shape[-1]  # type: ignore[union-attr]
    for key, style in plan.items():
        if (module := converted.get(key)) is None:
            continue
        if isinstance(style, ReplicatedInRegion) and width not in (None, module.in_features):
            raise PlanError(
                f"{key} (Float8Linear, {module.in_features} in, {module.out_features} out): it reads no sequence of {width} "
                "numbers a token, so a rank may give it a part of the heads alone, which has another scale than all of "
                f"them: leave it out of float8 (filter '{_end_of(key)}')"
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
    """Return the last part of `key` for a filter, of an item of a list the last two."""
    parts = key.split(".")
    return ".".join(parts[-2:] if parts[-1].isdecimal() else parts[-1:])


def _sizes(style: ParallelStyle, module: Any) -> Iterator[tuple[str, int, Callable[[int], bool]]]:
    """Yield what the degree splits: the side, its size, and whether a degree gives aligned shares of it."""
    if isinstance(style, KVColwise):
        size, heads = module.out_features, style.heads
        yield "outputs", size, lambda d: not size % (min(d, heads) * ALIGNMENT)
    elif isinstance(style, (Colwise, VocabHead)):
        size = module.out_features
        yield "outputs", size, lambda d: not size % (d * ALIGNMENT)
    elif isinstance(style, Rowwise | RowwiseInRegion):
        size = module.in_features
        yield "inputs", size, lambda d: not size % (d * ALIGNMENT)


def check_torchao_styles(
    plan: Mapping[str, ParallelStyle], model: nn.Module, backend: str | None = None
) -> None:
    """Refuse torchao's own float8 styles where they would be wrong, or fail.

    They check that scales are dynamic, but not that a tensor has one scale, so the rowwise recipes pass their check.

    Args:
        plan: the user's plan, which may hold any ParallelStyle.
        model: not yet split.
        backend: the TP group's; None if it is not known yet.

    Raises:
        PlanError: the recipe scales rows; the module is not converted; the backend is gloo, which has no float8.
    """
    recipe = recipe_of(model)
    for key, style in plan.items():
        if type(style).__module__ != "torchao.float8.float8_tensor_parallel":
            continue
        module = target(key, model).module
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


def float8_crossings(plan: Mapping[str, ParallelStyle], model: nn.Module) -> dict[str, Crossing]:
    """Return how each border by which converted modules stand is crossed, by plan key.

    Raises:
        PlanError: the model was converted by several recipes, or by one that no style knows.
    """
    recipe = recipe_of(model)
    if recipe == "none":
        return {}
    otherwise = f"{recipe} scales the tensors of each product along other dimensions: cast in each module"
    found: dict[str, Crossing] = {}
    for key, style in plan.items():
        if not isinstance(style, (Region, Rowwise, VocabHead)) or not (style.closes or _enters(style)):
            continue
        linears = {
            k: s
            for k, s in plan.items()
            if (k == key or k.startswith(f"{key}.")) and isinstance(target(k, model).module, nn.Linear)
        }
        last = [k for k, s in linears.items() if isinstance(s, Rowwise)]
        first = [k for k in linears if k not in last]
        if not any(is_float8(target(k, model).module) for k in linears):
            continue
        if recipe != "tensorwise":
            found[key] = Crossing(otherwise if _enters(style) else "", otherwise if style.closes else "")
            continue
        enter = leave = ""
        if _enters(style):
            enter = _reason(first, model, "reads it too")
            if isinstance(style, Region) and not style.float8_input:
                enter = "the plan says that something else reads it, too (float8_input = False)"
            enter = plain_border(target(key, model).module) or enter
        if style.closes:
            biased = (
                k for k in last if isinstance(style, Region) and target(k, model).module.bias is not None
            )
            leave = plain_border(target(key, model).module) or next(
                (f"the bias of {k} sums them, too" for k in biased), None
            )
            leave = (
                leave
                or _reason(last, model, "gives it")
                or next(
                    (
                        f"{k} is no Linear, and gives it"
                        for k, s in plan.items()
                        if k.startswith(f"{key}.") and isinstance(s, Rowwise) and k not in linears
                    ),
                    None,
                )
            )
        found[key] = Crossing(enter, leave)
    return found


def _enters(style: ParallelStyle) -> bool:
    return isinstance(style, (Region, VocabHead))


def _reason(keys: list[str], model: nn.Module, what: str) -> str | None:
    modules = {key: target(key, model).module for key in keys}
    plain = [key for key, module in modules.items() if not is_float8(module)]
    if plain:
        return f"{plain[0]} is not converted, and {what}"
    adapters = [key for key, module in modules.items() if is_adapted(module)]
    return f"the adapter of {adapters[0]} is not converted, and {what}" if adapters else None
