"""The base plan of FLA's mixers: a subclass lists their modules and parameters by name."""

from torch import nn

from titanplans import Plan

from .transformer import TransformerPlan


class MixerPlan(TransformerPlan):
    """Plan a mixer that is split by heads. Subclasses name its modules and parameters; names that the mixer lacks are
    ignored.

    The rest of the model is FLA's transformer.
    """

    by_head: tuple[str, ...] = ()
    """Names that are split by the heads that `head_names` count."""
    by_shared_head: tuple[str, ...] = ()
    """Names that are split by the heads that `shared_head_names` count, or by all heads if the mixer has no such count. A
    name that is also in `by_head` is split like the names here."""
    replicated: tuple[str, ...] = ()
    """Names that are replicated, since all heads use them."""
    counts: tuple[str, ...] = ()
    """Attributes that count heads or widths in the mixer's code; they are divided by the degree."""
    may_gather = False
    """The mixer's code needs the hidden states of all tokens, because it shifts them or removes padding with a mask."""
    shared_counts: tuple[str, ...] = ()
    """Attributes that count shared heads or their widths; they are set to this rank's count."""

    def attn_plan(self, attn: nn.Module) -> Plan:
        return {
            **self.attn_region(may_gather=self.may_gather),
            **{name: self.replicated_in_region() for name in self.replicated if has(attn, name)},
            **{name: self.colwise() for name in self.by_head if has(attn, name)},
            **{name: self.kv_colwise(attn) for name in self.by_shared_head if has(attn, name)},
            "o_proj": self.rowwise(reduce_output=False),
        }

    def local_attributes(self, attn: nn.Module) -> dict[str, int]:
        attributes, heads = self.divide_by_degree(attn, *self.counts), self.kv_heads(attn)
        if heads is None:  # as many as query heads
            return attributes | self.divide_by_degree(attn, *self.shared_counts)
        local_heads = self.heads_per_rank(heads)
        return attributes | {name: getattr(attn, name) // heads * local_heads for name in self.shared_counts}


def has(module: nn.Module, name: str) -> bool:
    """Whether `module` has a module or a parameter with this dotted name."""
    for step in name.split("."):
        module = getattr(module, step, None)  # type: ignore[assignment]
    return module is not None
