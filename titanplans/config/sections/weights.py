"""How weights are adapted, frozen and quantised: [lora], training.freeze, [quantize.linear.float8].

The code is in `titanplans.adapters` and `titanplans.precision`.
"""

from typing import Literal

from titanplans.config.compatibility import groups
from titanplans.config.options import Options
from titanplans.config.values import FractionBelowOne, Positive32, PositiveFloat, Strings


class LoRA(Options, section="lora", refuses=groups.lora):
    """Low-rank adapters of Linear modules (LoRA); all other parameters are frozen. Switched on by rank."""

    rank: Positive32 | None = None
    """Rank of the adapters: the number of rows of lora_A and of columns of lora_B. Unset: no adapters."""

    alpha: PositiveFloat | None = None
    """The output of an adapter is multiplied by alpha / rank; unset: alpha = rank."""

    dropout: FractionBelowOne = 0.0
    """Dropout probability of an adapter's input, in training."""

    target_modules: Strings = ("all-linear",)
    """Modules that get an adapter: the last components of their names ("q_proj", "mlp.down_proj"), or patterns of full
    names ("model.layers.[01].*"); "all-linear": every plain Linear but the head."""

    exclude_modules: Strings = ()
    """Modules among target_modules that get no adapter; names and patterns as in target_modules."""

    quantize_base: Literal["nf4"] | None = None
    """Type in which the frozen weights of modules with adapters are kept: "nf4", four bits (QLoRA); unset:
    training.dtype."""

    modules_to_save: Strings = ()
    """Modules that are trained in full and saved with the adapter; names and patterns as in target_modules."""


class Freezing(Options):
    """Parameters that do not train."""

    freeze: Strings = ()
    """Parameters that do not train: names of modules or parameters, or patterns of such names ("model.embed_tokens",
    "model.layers.[01].*"). Each must match a module or parameter."""


class Float8(Options, section="quantize.linear.float8", refuses=groups.float8):
    """Linear modules that multiply in float8, with torchao. Switched on by recipe_name."""

    recipe_name: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] | None = None
    """Float8 recipe: a scale per tensor ("tensorwise"), per row ("rowwise"), or per row with weight gradients in high
    precision ("rowwise_with_gw_hp"); unset: no float8."""

    filter_fqns: Strings = ()
    """Parts of names of Linear modules that are not converted; each part must occur in a name. "auto_filter_small_kn"
    stands for modules that are too small to gain from float8, according to torchao's table."""

    filter_unaligned: bool = False
    """Do not convert modules whose sizes are not multiples of 16; false: such modules are refused."""

    emulate: bool = False
    """Cast to float8, but multiply in float32: for devices without float8."""

    enable_fsdp_float8_all_gather: bool = False
    """Cast weights to float8 before FSDP2 gathers them, which halves the bytes of a gather in bfloat16; tensorwise
    only."""

    precompute_float8_dynamic_scale_for_fsdp: bool = False
    """Under enable_fsdp_float8_all_gather: compute the scales of all weights with one all-reduce before each forward."""


class Linear(Options):
    """Quantisation of Linear modules."""

    float8: Float8 = Float8()


class Quantize(Options):
    """Quantisation."""

    linear: Linear = Linear()
