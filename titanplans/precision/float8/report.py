"""What became of each Linear of a model in float8, and what crosses the borders of its regions so, as JSON has it."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import nn

from titanplans.precision.float8.conversion import Conversion
from titanplans.split.converted import Crossing, float8_linears
from titanplans.torch_private.torchao import is_float8_gathered


def float8_report(
    model: nn.Module, done: Conversion | None, crossings: Mapping[str, Crossing]
) -> dict[str, Any] | None:
    """Return what became of each Linear of `model` as JSON has it; None if nothing is float8.

    The `borders` are those of tensor-parallel regions, by plan key: what crosses them "in float8", or why not. Calls with
    a mask [batch, sequence] enter in high precision (docs/float8.md). `done` is what `convert_to_float8` returned.
    """
    if done is None:
        return None
    return dataclasses.asdict(done) | {
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
