"""Conversions of weights that older releases of flash-linear-attention stored differently, as transformers writes them.

transformers' own table has no models of FLA, and FLA's own conversions run only in its `load_state_dict`, or in scripts.
A release that computes differently (norms over all heads, `norm_first`) can't be converted: its shapes are refused.
"""

from collections.abc import Collection
from typing import Any, NamedTuple

from transformers.core_model_loading import Chunk, WeightConverter, WeightRenaming, WeightTransform


class Older(NamedTuple):
    """An older format, and how its folders are recognised."""

    lacks: str
    """A part of a name that such a folder does not have."""

    conversion: WeightTransform

    models: tuple[str, ...] = ()
    """Their `model_type`; () for all of FLA."""


class _Mixes(Chunk):
    """Splits RWKV-7's weights of the token shift, [6, hidden], into six tensors [1, 1, hidden]."""

    def convert(self, input_dict: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        converted = super().convert(input_dict, *args, **kwargs)
        return {name: chunk.unsqueeze(0) for name, chunk in converted.items()}


_GATE, _UP = "mlp.gate_proj.weight", "mlp.up_proj.weight"
OLDER = (
    # fla-org/flash-linear-attention b48ca31d (February 2025) split one matrix into two, the gate's rows first.
    Older(_UP, WeightConverter([_GATE], [_GATE, _UP], [Chunk(dim=0)])),
    # 2d251bb3 (April 2025): g_proj is the output gate since.
    Older(".f_proj.", WeightRenaming(r"\.attn\.g_proj\.", ".attn.f_proj."), ("forgetting_transformer",)),
    # 6b673e6b (April 2025).
    Older(
        "attn.x_r",
        WeightConverter(["attn.x_x"], [f"attn.x_{each}" for each in "rwkvag"], [_Mixes(dim=0)]),
        ("rwkv7",),
    ),
    # As in the models' load hooks: the name in state-spaces' own folders.
    Older(
        "backbone.embeddings.",
        WeightRenaming(r"^backbone\.embedding\.", "backbone.embeddings."),
        ("mamba", "mamba2", "mamba3", "log_linear_mamba2"),
    ),
)


def older_conversions(model_type: str, module: str, published: Collection[str]) -> list[WeightTransform]:
    """Return the conversions that a folder with these names needs in addition to transformers' own.

    Args:
        model_type: the config's.
        module: where the model's class is from.
        published: names in the folder.
    """
    if not module.startswith("fla."):
        return []
    return [
        older.conversion
        for older in OLDER
        if model_type in (older.models or (model_type,))
        and not any(older.lacks in name for name in published)
    ]
