"""The base plan of FLA's mixers: a subclass lists their modules and parameters by name."""

from torch import nn

from titanplans import Plan

from .transformer import TransformerPlan


class MixerPlan(TransformerPlan):
    """A mixer that is split by heads, by the names of its modules and parameters; names that it does not have are ignored.

    The rest of the model is FLA's transformer.
    """

    by_head: tuple[str, ...] = ()
    """Split by the heads that `head_names` count."""
    by_shared_head: tuple[str, ...] = ()
    """Split by the heads that `shared_head_names` count, or by all heads if there are none; overrides `by_head`."""
    replicated: tuple[str, ...] = ()
    """Replicated, since all heads use them."""
    counts: tuple[str, ...] = ()
    """Attributes in the mixer's code that count heads or widths: divided by the degree."""
    may_gather = False
    """Its code needs the hidden states of all tokens: it shifts them, or removes padding from them by a mask."""
    shared_counts: tuple[str, ...] = ()
    """Attributes that count shared heads or their widths: set to this rank's count."""

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
