"""The section about float8 in `parallelism.json`."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import nn

from titanplans.precision.float8.conversion import Conversion
from titanplans.split.converted import Crossing, float8_linears
from titanplans.torch_private.torchao import is_float8_gathered


def float8_report(
    model: nn.Module, conversion: Conversion | None, crossings: Mapping[str, Crossing]
) -> dict[str, Any] | None:
    """Return `conversion` and the state of the parallelized `model` as values for JSON; None if nothing was converted.

    "borders" says for each tensor-parallel region, by plan key, whether activations and gradients cross its border in
    float8, or why not. If a call has a mask [batch, sequence], its input enters in high precision in any case
    (docs/float8.md).
    """
    if conversion is None:
        return None
    return dataclasses.asdict(conversion) | {
        "fsdp_all_gather": any(
            is_float8_gathered(m._parameters["weight"]) for m in float8_linears(model).values()
        ),
        "scales_together": "_float8_scales" in model.__dict__,
        "borders": {
            name: {
                side: "in float8" if why is None else f"not in float8: {why}"
                for side, why in crossing.items()
            }
            for name, crossing in crossings.items()
        },
    }
