"""Which modules of a model torchao has converted to float8, and with which recipe.

`titanplans.precision.float8` converts them before a plan is applied. Its module `checks` refuses plans that can't split
them, and decides which tensors cross the border in float8 (`Crossing`).
"""

from collections.abc import Mapping
from functools import cache
from typing import Any, Literal, get_args

import torch
from torch import nn

from titanplans.errors import PlanError

Recipe = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"]
RECIPES: tuple[Recipe, ...] = get_args(Recipe)

ALIGNMENT = 16
"""Both sizes of each matrix in a float8 product must be multiples of this number: cuBLAS's and CUTLASS's kernels load 16
bytes."""

_PLAIN = "_plain_border"


Crossing = Mapping[Literal["activations", "gradients"], str | None]
"""How activations that enter a region or the head, and gradients of its output, cross the border. None: in float8, cast
once for all projections and gathered as bytes. A string: in high precision, for the reason that the string states."""


def keep_border_plain(module: nn.Module, reason: str) -> None:
    """Mark `module` so that under a plan the sequence enters it in high precision, for this `reason`."""
    module.__dict__[_PLAIN] = reason


def plain_border(module: nn.Module) -> str | None:
    """Return the reason that `keep_border_plain` recorded for `module`; None: it was not called."""
    return module.__dict__.get(_PLAIN)


def is_float8(module: nn.Module) -> bool:
    """Whether `module` is a Linear that torchao has converted, split by a plan or not."""
    return any(
        cls.__name__ == "Float8Linear" and cls.__module__ == "torchao.float8.float8_linear"
        for cls in type(module).__mro__
    )


def is_cast(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is torchao's tensor of float8 values and a scale."""
    return type(tensor).__name__ == "Float8TrainingTensor"


def is_quantised_by_torchao(param: torch.Tensor) -> bool:
    """Whether `param` is a quantised tensor of torchao, other than a weight that is cast when FSDP2 gathers it."""
    names = {cls.__name__ for cls in type(param).__mro__ if cls.__module__.partition(".")[0] == "torchao"}
    return bool(names) and "WeightWithDynamicFloat8CastTensor" not in names


def float8_linears(model: nn.Module) -> dict[str, Any]:
    """Return the converted modules of `model` by fully qualified name."""
    return {name: module for name, module in model.named_modules() if is_float8(module)}


def recipe_of(model: nn.Module) -> Recipe | Literal["none"]:
    """Return the recipe with which the Linear modules of `model` were converted.

    Raises:
        PlanError: there are several recipes, or a config that matches none of `RECIPES`.
    """
    first_with: dict[str, str] = {}
    for name, module in float8_linears(model).items():
        recipe = _recipe_of_config(module.config)
        if recipe is None:
            raise PlanError(
                f"{name} (Float8Linear) has a config that matches none of {', '.join(RECIPES)}, so no plan can split "
                "it: convert the model with one of these recipes, or do not convert this module"
            )
        first_with.setdefault(recipe, name)
    if len(first_with) > 1:
        (one, first), (other, second) = list(first_with.items())[:2]
        raise PlanError(
            f"{first} is converted to float8 with the recipe {one}, and {second} with {other}: use one recipe for a "
            "model"
        )
    return next(iter(first_with), "none")  # type: ignore[return-value]


@cache
def _recipe_of_config(config: Any) -> Recipe | None:
    # Imported only if a model holds one of torchao's modules.
    from torchao.float8 import Float8LinearConfig

    casts = [name for name in vars(config) if name.startswith("cast_config") or name.startswith("round_")]
    for recipe in RECIPES:
        expected = Float8LinearConfig.from_recipe_name(recipe)
        if all(getattr(config, name) == getattr(expected, name) for name in casts):
            return recipe
    return None
