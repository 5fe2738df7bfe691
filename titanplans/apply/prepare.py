"""`prepare`: what changes a model's modules before a plan splits them: float8, adapters, frozen parts, in this order.

No part of `apply_plan`: a training step, the dry run of a job, a proof and the count of FLOPs prepare a model here before.
"""

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
    """The changes that were made."""

    float8: Conversion | None
    adapters: Adapters | None
    frozen: int | None
    """How many numbers do not train because of `freezes`; None where it names nothing."""


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
    """Convert the Linear modules of `model` to float8, give them adapters and freeze parameters, in place.

    Args:
        model: on any device, meta included; not split, sharded or wrapped.
        float8: the recipe, and which modules stay as they are; without a recipe nothing is converted.
        lora: rank and modules of the adapters; without a rank there are none.
        freezes: names, or patterns of names, of what does not train.
        device_type: where the model will run.
        compiled: whether its blocks will be compiled. What a forward reads around a module is then looked for in its
            source, and else watched in the first forward.
        refuse: makes the error of `freezes` from the reason.

    Raises:
        OptionError, ParallelError: an option can't be honoured for this model.
    """
    converted = adapters = frozen = None
    # Float8 comes first: an adapter belongs to a module as it will multiply.
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
