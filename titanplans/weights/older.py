"""What older releases of flash-linear-attention have stored otherwise, in the form of transformers' conversions.

transformers' own table has no models of FLA, and FLA's own conversions run in its `load_state_dict` alone, or in scripts.
Where a release computes differently (norms over all heads, `norm_first`), names do not help: its shapes are refused.
"""

from collections.abc import Collection
from typing import Any, NamedTuple

from transformers.core_model_loading import Chunk, WeightConverter, WeightRenaming, WeightTransform


class Older(NamedTuple):
    """A way of storing, and how a folder that has it is known."""

    lacks: str
    """In no name of such a folder."""

    conversion: WeightTransform

    models: tuple[str, ...] = ()
    """Their `model_type`; none is all of FLA."""


class _Mixes(Chunk):
    """RWKV-7's six ways of mixing with the token before, [6, hidden], as six tensors [1, 1, hidden]."""

    def convert(self, input_dict: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        converted = super().convert(input_dict, *args, **kwargs)
        return {name: chunk.unsqueeze(0) for name, chunk in converted.items()}


_GATE, _UP = "mlp.gate_proj.weight", "mlp.up_proj.weight"
OLDER = (
    # fla-org/flash-linear-attention b48ca31d (February 2025) has made two matrices of one, the gate's rows first.
    Older(_UP, WeightConverter([_GATE], [_GATE, _UP], [Chunk(dim=0)])),
    # 2d251bb3 (April 2025): g_proj is the output's gate since.
    Older(".f_proj.", WeightRenaming(r"\.attn\.g_proj\.", ".attn.f_proj."), ("forgetting_transformer",)),
    # 6b673e6b (April 2025).
    Older(
        "attn.x_r",
        WeightConverter(["attn.x_x"], [f"attn.x_{each}" for each in "rwkvag"], [_Mixes(dim=0)]),
        ("rwkv7",),
    ),
    # As the models' load hooks: the name that state-spaces' own folders have.
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
