"""How weights are adapted, frozen and quantised: [lora], training.freeze, [quantize.linear.float8].

`titanplans.adapters` and `titanplans.precision` carry it out.
"""

from typing import Literal

from titanplans.config.compatibility import groups
from titanplans.config.options import Options
from titanplans.config.values import FractionBelowOne, Positive32, PositiveFloat, Strings


class LoRA(Options, section="lora", refuses=groups.lora):
    """Low-rank adapters of Linear modules, the only ones that train (LoRA); rank switches it on."""

    rank: Positive32 | None = None
    """Rank of the adapters: rows of lora_A, columns of lora_B. Unset: no adapters."""

    alpha: PositiveFloat | None = None
    """The output of an adapter is multiplied by alpha / rank; unset: alpha = rank."""

    dropout: FractionBelowOne = 0.0
    """Dropout probability of an adapter's input, in training."""

    target_modules: Strings = ("all-linear",)
    """Modules that get an adapter: ends of names ("q_proj", "mlp.down_proj"), or patterns of whole ones
    ("model.layers.[01].*"); "all-linear": every plain Linear but the head."""

    exclude_modules: Strings = ()
    """Modules among target_modules that get no adapter, by the same names and patterns."""

    quantize_base: Literal["nf4"] | None = None
    """Type in which the frozen weights under adapters are kept: "nf4", four bits (QLoRA); unset: training.dtype."""

    modules_to_save: Strings = ()
    """Modules that train in full and are saved with the adapter, by the same names and patterns."""


class Freezing(Options):
    """Parameters that do not train."""

    freeze: Strings = ()
    """Parameters that do not train: names of modules or parameters, or patterns of them ("model.embed_tokens",
    "model.layers.[01].*"); each must match one."""


class Float8(Options, section="quantize.linear.float8", refuses=groups.float8):
    """Linear modules that multiply in float8, by torchao; recipe_name switches it on."""

    recipe_name: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] | None = None
    """Float8 recipe: a scale per tensor ("tensorwise"), per row ("rowwise"), or per row with weight gradients in high
    precision ("rowwise_with_gw_hp"); unset: no float8."""

    filter_fqns: Strings = ()
    """Parts of names of Linear modules that are not converted; each must match one; "auto_filter_small_kn" stands for
    modules too small to gain, by torchao's figures."""

    filter_unaligned: bool = False
    """Do not convert modules whose sizes are no multiples of 16; false: the job is refused."""

    emulate: bool = False
    """Cast to float8, but multiply in float32: for devices without float8."""

    enable_fsdp_float8_all_gather: bool = False
    """Cast weights to float8 before FSDP2 gathers them: half of bfloat16's bytes; tensorwise only."""

    precompute_float8_dynamic_scale_for_fsdp: bool = False
    """Under enable_fsdp_float8_all_gather: compute the scales of all weights by one all-reduce before each forward."""


class Linear(Options):
    """Quantisation of Linear modules."""

    float8: Float8 = Float8()


class Quantize(Options):
    """Quantisation."""

    linear: Linear = Linear()
