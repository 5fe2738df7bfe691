"""`prepare`: change a model before a plan splits it. Called for training, dry runs, proofs and counts of FLOPs."""

from collections.abc import Callable
from typing import NamedTuple

from torch import nn

from titanplans.adapters.add import Adapters, add_adapters, check_before_compile, freeze
from titanplans.config import Float8, LoRA
from titanplans.errors import ParallelError, UserError
from titanplans.precision.float8.conversion import (
    Conversion,
    check_calls,
    convert_to_float8,
    keep_plain_between_graphs,
    refuse_read_weights,
)
from titanplans.split.parameters.replaced import replacing


class Preparation(NamedTuple):
    """The changes that `prepare` made."""

    float8: Conversion | None
    adapters: Adapters | None
    frozen: int | None
    """Number of parameter elements that do not train because of `freezes`; None if `freezes` is empty."""


def prepare(
    model: nn.Module,
    *,
    float8: Float8 = Float8(),  # noqa: B008  frozen
    lora: LoRA = LoRA(),  # noqa: B008
    freezes: tuple[str, ...] = (),
    device_type: str = "cpu",
    compiled: bool = False,
    refuse: Callable[[str], UserError] = ParallelError,
) -> Preparation:
    """Convert the Linear modules of `model` to float8, add adapters and freeze parameters, in place.

    Args:
        model: on any device, meta included; not split, sharded or wrapped.
        float8: the recipe, and which modules are not converted; without a recipe nothing is converted.
        lora: rank and modules of the adapters; without a rank there are none.
        freezes: names, or patterns of names, of parameters that do not train.
        device_type: where the model will run.
        compiled: the model's blocks will be compiled. Weights that a forward uses without calling their module are then
            found by reading source code; otherwise, by watching the first forward.
        refuse: makes the error about `freezes` from the reason.

    Raises:
        OptionError, ParallelError: an option can't be honoured for this model.
    """
    converted = adapters = frozen = None
    # Float8 comes first, because an adapter subclasses the class that computes the product.
    if float8.recipe_name is not None:
        with replacing(model):
            converted = convert_to_float8(model, float8, device_type)
        if compiled:
            refuse_read_weights(model)
            keep_plain_between_graphs(model)
        else:
            check_calls(model)
    if lora.rank is not None:
        adapters = add_adapters(model, lora)
    if compiled:
        check_before_compile(model)
    if freezes:
        frozen = freeze(model, freezes, refuse)
    return Preparation(converted, adapters, frozen)
