"""The communication of a model that is split by tokens: exchanges of tokens for heads, and gathers of all tokens.

A mixer needs one exchange before its kernel and one after it. Some code needs all tokens: a mixer's token shift before its
products, or a load-balancing loss. No plan can avoid this gather, and the report names the code.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from titanplans.apply.apply import AppliedPlan
from titanplans.observe.operators import Collective
from titanplans.split.border import Border
from titanplans.split.costs import Call, exchanged_elements
from titanplans.split.state import state_of
from titanplans.split.tokens.sharded_sequence import ShardedSequence
from titanplans.text import counted, format_bytes

Calls = Mapping[str, Sequence[Call]]
"""The calls of modules in one forward, by fully qualified name."""


class FullSequenceGathers(NamedTuple):
    """Tells which collectives gather all tokens for code that needs them, or scatter their gradients.

    Attributes:
        ranks: the context-parallel ranks; () without context parallelism.
        mixers: names of the mixers.
        blocks: names of the blocks.
        hidden: number of elements of the hidden states of full sequences.
    """

    ranks: tuple[int, ...] = ()
    mixers: tuple[str, ...] = ()
    blocks: tuple[str, ...] = ()
    hidden: int = 0

    def mixer_of(self, collective: Collective) -> str | None:
        """Return the mixer in which `collective` is issued; None if it is in none."""
        return holder(collective.module, self.mixers)

    def holds(self, collective: Collective) -> bool:
        """Whether `collective` gathers all tokens, or scatters their gradients."""
        if collective.group != self.ranks or collective.operation not in ("all_gather", "reduce_scatter"):
            return False
        # A block needs no full hidden states outside of its mixer, but the model's code outside of blocks may.
        margin = 1 if holder(collective.module, self.blocks) else 0
        return self.mixer_of(collective) is not None or (collective.elements or 0) <= self.hidden - margin

    def lines(self, collectives: Sequence[Collective]) -> list[str]:
        """Return lines about `collectives` of this kind: the modules that need them, and the bytes."""
        if not collectives:
            return []
        sent = (
            counted(len(collectives), "collective"),
            format_bytes(sum(c.received or 0 for c in collectives)),
        )
        readers = dict.fromkeys(self.mixer_of(collective) or "other code" for collective in collectives)
        return [
            f"context parallelism gathers and sums, in {sent[0]} ({sent[1]} received by a rank), all tokens of "
            f"{', '.join(readers)}"
        ]


def full_sequence_gathers(applied: AppliedPlan, calls: Calls) -> FullSequenceGathers:
    """Return which collectives of a split model gather all tokens, from the `calls` of one forward."""
    border, decoder = applied.border, applied.decoder
    if border.tokens.mesh is None:
        return FullSequenceGathers()
    mixers = tuple(dict.fromkeys((*within_mixers(applied).values(), *decoder.mixers)))
    local_elements = [call.elements for name in mixers for call in calls.get(name, ())]
    ranks = tuple(dist.get_process_group_ranks(border.tokens.mesh.get_group()))
    return FullSequenceGathers(
        ranks, mixers, tuple(decoder.names), border.tokens.ranks * max(local_elements, default=0)
    )


def within_mixers(applied: AppliedPlan) -> Mapping[str, str]:
    """Return, for each mixer that is split by tokens and each module inside of it, the name of the mixer."""
    plan = applied.resolved
    if applied.border.tokens.ranks == 1:
        return {}
    regions = {entry.path: plan.token_region_of(entry) for entry in plan.entries}
    return {path: region for path, region in regions.items() if region}


def local_shape(x: torch.Tensor, border: Border, has_full_ids: bool) -> torch.Size:
    """Return the shape of the local tokens of `x`: a ShardedSequence, a tensor of local tokens, or the token ids of full
    sequences (`has_full_ids`)."""
    shape, tokens = x.shape, border.tokens
    if isinstance(x, ShardedSequence):
        return x.shard.shape
    if tokens.ranks == 1 or not has_full_ids or x.ndim <= tokens.dim:
        return shape
    return torch.Size((*shape[: tokens.dim], shape[tokens.dim] // tokens.ranks, *shape[tokens.dim + 1 :]))


def with_all_tokens(call: Call, applied: AppliedPlan) -> Call:
    """Return the call of a mixer with the tokens of all CP ranks, over all ranks that the heads are split over."""
    shape = torch.Size((call.tokens * applied.border.tokens.ranks, call.shapes[0][-1]))
    return Call((shape,), None, applied.mesh.size())


def exchanged_rows(module: nn.Module, border: Border) -> int:
    """Return the number of rows that the running call of the product `module` exchanges, over all CP ranks; 0 without an
    exchange."""
    state = state_of(module)
    if state is None or state.heads is None or not state.uses_all_rows:
        return 0
    return border.tokens.ranks * state.heads.assignment.rows


def exchanges(applied: AppliedPlan, calls: Calls) -> Iterator[tuple[str, int]]:
    """Yield each exchange of tokens for heads, or back, that is needed: the mixer and the number of elements."""
    for path, mixer in within_mixers(applied).items():
        yield from ((mixer, exchanged_elements(call)) for call in calls.get(path, ()) if call.exchanged_rows)


def holder(module: str | None, names: Iterable[str | None]) -> str | None:
    """Return the first of `names` that is `module` or contains it; None if none does."""
    return next((name for name in names if name and f"{module}.".startswith(f"{name}.")), None)
