"""The base plan of FLA's mixers: a subclass lists their parts by name."""

from torch import nn

from titanplans import Plan

from .transformer import TransformerPlan


class MixerPlan(TransformerPlan):
    """A mixer whose heads are split, by the names of its modules and parameters; parts that it does not have are left out.

    The rest of the model is FLA's transformer.
    """

    by_head: tuple[str, ...] = ()
    """Split by the heads that `head_names` count."""
    by_shared_head: tuple[str, ...] = ()
    """Split by the heads that `shared_head_names` count, or by all heads if there are none; wins over `by_head`."""
    for_all_heads: tuple[str, ...] = ()
    """One for all heads: replicated."""
    counts: tuple[str, ...] = ()
    """Attributes that count heads or widths, which the mixer's code reads: divided by the degree."""
    gathers = False
    """Its code needs hidden states of all tokens: it shifts them, or takes padding out of them under a mask."""
    shared_counts: tuple[str, ...] = ()
    """Attributes that count shared heads or their widths: set to this rank's share of them."""

    def attn_plan(self, attn: nn.Module) -> Plan:
        return {
            **self.attn_region(gathers=self.gathers),
            **{name: self.replicated_in_region() for name in self.for_all_heads if has(attn, name)},
            **{name: self.colwise() for name in self.by_head if has(attn, name)},
            **{name: self.kv_colwise(attn) for name in self.by_shared_head if has(attn, name)},
            "o_proj": self.rowwise(reduce_output=False),
        }

    def local_attributes(self, attn: nn.Module) -> dict[str, int]:
        counted, heads = self.divided(attn, *self.counts), self.kv_heads(attn)
        if heads is None:  # as many as query heads
            return counted | self.divided(attn, *self.shared_counts)
        shared = self.heads_per_rank(heads)
        return counted | {name: getattr(attn, name) // heads * shared for name in self.shared_counts}


def has(module: nn.Module, name: str) -> bool:
    """Whether `module` has a module or a parameter of this dotted name."""
    for step in name.split("."):
        module = getattr(module, step, None)  # type: ignore[assignment]
    return module is not None
