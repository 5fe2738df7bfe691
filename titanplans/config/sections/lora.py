"""[lora]: low-rank adapters of frozen weights, carried out by `titanplans.adapters`."""

from typing import Literal

from titanplans.config.compatibility import groups
from titanplans.config.options import Options
from titanplans.config.values import FractionBelowOne, Positive32, PositiveFloat


class LoRA(Options, section="lora", refuses=groups.lora):
    """Low-rank adapters of Linear modules, the only ones that train (LoRA); rank switches it on."""

    rank: Positive32 | None = None
    """Rows of each lora_A, columns of each lora_B; unset: no adapters."""

    alpha: PositiveFloat | None = None
    """An adapter's product is multiplied by alpha / rank; unset: alpha is the rank."""

    dropout: FractionBelowOne = 0.0
    """Probability with which a number of an adapter's input is set to zero in training."""

    target_modules: tuple[str, ...] = ("all-linear",)
    """Modules that get an adapter: ends of names ("q_proj", "mlp.down_proj"), or patterns of whole ones
    ("model.layers.[01].*"); "all-linear": every plain Linear but the head."""

    exclude_modules: tuple[str, ...] = ()
    """Of these, the modules that get none, by the same names and patterns."""

    quantize_base: Literal["nf4"] | None = None
    """Keep the frozen weights that have adapters in four bits (QLoRA)."""

    modules_to_save: tuple[str, ...] = ()
    """Modules that train as they are and belong to the adapter, by the same names and patterns."""


class Freezing(Options):
    """Parameters that do not train."""

    freeze: tuple[str, ...] = ()
    """Parameters that keep their values: names of modules or parameters, or patterns of them ("model.embed_tokens",
    "model.layers.[01].*"); each must match one."""
