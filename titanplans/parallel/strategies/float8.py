"""Options of float8; what they do to a model is in `titanplans.parallel.float8`."""

from dataclasses import dataclass, fields
from typing import ClassVar, Literal

from titanplans.parallel.strategies.options import Options


@dataclass(frozen=True, kw_only=True)
class Float8(Options):
    """Linear modules that multiply in float8, by torchao."""

    title: ClassVar[str] = "float8"

    recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] | None = None
    """One scale a tensor (tensorwise), one a row (rowwise), or rows with weights' gradients in high precision
    (rowwise_with_gw_hp); unset: no float8."""

    filter_fqns: tuple[str, ...] = ()
    """Parts of names of Linear modules that stay as they are; "auto_filter_small_kn" stands for what is too small to gain,
    by torchao's figures."""

    filter_unaligned: bool = False
    """Leave out what has sizes that are no multiples of 16, instead of refusing it."""

    emulate: bool = False
    """Cast to float8, but multiply in float32: for devices without float8."""

    fsdp_all_gather: bool = False
    """Under FSDP2: cast weights before they are gathered, to half of bfloat16's bytes; tensorwise only."""

    precompute_scales: bool = False
    """Under fsdp_all_gather: one all-reduce for the scales of all weights, before each forward."""

    def check(self) -> None:
        if self.recipe is None:
            for item in fields(self):
                if item.name != "recipe" and getattr(self, item.name) != item.default:
                    raise self.refuse(item.name, "nothing is float8: set recipe, or leave it out")
        if self.fsdp_all_gather and self.recipe != "tensorwise":
            raise self.refuse(
                "fsdp_all_gather",
                f'a weight that is gathered in float8 has one scale, and recipe = "{self.recipe}" has one a row: take '
                "tensorwise, or gather in high precision",
            )
        if self.precompute_scales and not self.fsdp_all_gather:
            raise self.refuse(
                "precompute_scales",
                "the scales are those of a float8 all-gather: set fsdp_all_gather to true, or drop it",
            )
