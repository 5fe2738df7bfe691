"""[quantize.linear.float8]: Linear modules that multiply in float8. Carried out by `titanplans.precision.float8`."""

from typing import Literal

from titanplans.config.compatibility import groups
from titanplans.config.options import Options


class Float8(Options, section="quantize.linear.float8", refuses=groups.float8):
    """Linear modules that multiply in float8, by torchao; recipe_name switches it on."""

    recipe_name: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] | None = None
    """One scale a tensor (tensorwise), one a row (rowwise), or rows with weights' gradients in high precision
    (rowwise_with_gw_hp); unset: no float8."""

    filter_fqns: tuple[str, ...] = ()
    """Parts of names of Linear modules that stay as they are; each must match one; "auto_filter_small_kn" stands
    for modules too small to gain, by torchao's figures."""

    filter_unaligned: bool = False
    """Leave out modules with sizes that are no multiples of 16, instead of refusing the job."""

    emulate: bool = False
    """Cast to float8, but multiply in float32: for devices without float8."""

    enable_fsdp_float8_all_gather: bool = False
    """FSDP2 casts weights before it gathers them, to half of bfloat16's bytes; tensorwise only."""

    precompute_float8_dynamic_scale_for_fsdp: bool = False
    """With enable_fsdp_float8_all_gather: the scales of all weights by one all-reduce, before each forward."""


class Linear(Options):
    """Quantisation of Linear modules."""

    float8: Float8 = Float8()


class Quantize(Options):
    """Quantisation."""

    linear: Linear = Linear()
