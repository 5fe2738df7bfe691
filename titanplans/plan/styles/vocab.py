"""Styles of the two ends of a model, whose vocabulary is sharded: the embedding and the head."""

from collections.abc import Mapping

from torch import nn
from torch.distributed.tensor import Shard

from titanplans.plan.layout import Layout
from titanplans.plan.styles.base import Style


class VocabEmbedding(Style):
    """Shard an embedding's rows [vocabulary, hidden]; the output is summed over the ranks.

    Args:
        begins_stream: in a forward the sum is laid out as the stream, which with sequence parallelism saves half of
            its bytes. For models that draw no conclusion (positions, masks, the places of images) from
            the embeddings; otherwise they are whole on every rank, and the stream begins at the first block.
    """

    def __init__(self, *, begins_stream: bool):
        self.begins_stream = begins_stream

    def layouts(self, module: nn.Module) -> Mapping[str, Layout]:
        return {"weight": Layout(Shard(0), Shard(0))}

    def refusal(self, module: nn.Module) -> str | None:
        if getattr(module, "max_norm", None) is not None:
            return f"max_norm = {module.max_norm} renormalises rows in place, which a shard can't: set it to None"
        if getattr(module, "scale_grad_by_freq", False):
            return "scale_grad_by_freq = True counts ids, of which a rank sees its shard's alone: set it to False"
        if getattr(module, "sparse", False):
            return "sparse = True makes sparse gradients, which a shard's are not: set it to False"
        return None


class VocabHead(Style):
    """Shard the head's vocabulary, the rows of its weight [vocabulary, hidden].

    The logits [..., vocabulary] are a DTensor, `Shard(-1)`, for a loss that works on vocabulary shards
    (`loss_parallel`), or else gathered to a plain tensor that is whole on every rank.
    """

    def __init__(self, *, loss_parallel: bool):
        self.loss_parallel = loss_parallel

    def layout(self, name: str, param: nn.Parameter) -> Layout | None:
        return Layout(Shard(0), Shard(0))
