"""What a model that is cut by tokens sends for it: exchanges of tokens for heads, and what code reads of all tokens.

A mixer needs one exchange in and one out. Its code may read the sequence before its products, as a token shift does, and
other code may count over all tokens, as a balance loss does: that is gathered, which no plan avoids, and it is named.
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


class ReadWhole(NamedTuple):
    """Which collectives bring code what it reads of all tokens, or back."""

    ranks: tuple[int, ...] = ()
    """Those that share a sequence; () without context parallelism."""
    mixers: tuple[str, ...] = ()
    blocks: tuple[str, ...] = ()
    hidden: int = 0
    """Elements of the hidden states of whole sequences."""

    def mixer_of(self, collective: Collective) -> str | None:
        """Return the mixer in which `collective` is issued."""
        return holder(collective.module, self.mixers)

    def holds(self, collective: Collective) -> bool:
        """Return whether `collective` is one of those."""
        if collective.group != self.ranks or collective.operation not in ("all_gather", "reduce_scatter"):
            return False
        # Between mixers a block has no use for hidden states of whole sequences; the model's own code may.
        least = 1 if holder(collective.module, self.blocks) else 0
        return self.mixer_of(collective) is not None or (collective.elements or 0) <= self.hidden - least

    def lines(self, collectives: Sequence[Collective]) -> list[str]:
        """Return in words for which modules `collectives` are, all of them in this."""
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


def read_whole(applied: AppliedPlan, calls: Calls) -> ReadWhole:
    """Return which collectives of a split model are what its code reads of all tokens; `calls` of one forward."""
    border, decoder = applied.border, applied.decoder
    if border.tokens.mesh is None:
        return ReadWhole()
    mixers = tuple(dict.fromkeys((*within_mixers(applied).values(), *decoder.mixers)))
    entered = [call.elements for name in mixers for call in calls.get(name, ())]
    ranks = tuple(dist.get_process_group_ranks(border.tokens.mesh.get_group()))
    return ReadWhole(ranks, mixers, tuple(decoder.names), border.tokens.ranks * max(entered, default=0))


def within_mixers(applied: AppliedPlan) -> Mapping[str, str]:
    """Return the mixer of each module that stands in one which is cut by tokens; of that itself, its own name."""
    plan = applied.resolved
    if applied.border.tokens.ranks == 1:
        return {}
    found = {entry.path: plan.token_region_of(entry) for entry in plan.entries}
    return {path: region for path, region in found.items() if region}


def own_shape(x: torch.Tensor, border: Border, whole_ids: bool) -> torch.Size:
    """Return the shape of this rank's tokens of `x`, which may be ids of whole sequences, or look like a whole one."""
    shape, tokens = x.shape, border.tokens
    if isinstance(x, ShardedSequence):
        return x.shard.shape
    if tokens.ranks == 1 or not whole_ids or x.ndim <= tokens.dim:
        return shape
    return torch.Size((*shape[: tokens.dim], shape[tokens.dim] // tokens.ranks, *shape[tokens.dim + 1 :]))


def of_all_tokens(call: Call, applied: AppliedPlan) -> Call:
    """Return the call of a mixer as what works inside of it sees it: with all tokens, among all that share the heads."""
    whole = torch.Size((call.tokens * applied.border.tokens.ranks, call.shapes[0][-1]))
    return Call((whole,), None, applied.mesh.size())


def exchanged_rows(module: nn.Module, border: Border) -> int:
    """Return the rows of all ranks that the running call of `module`, a product, exchanges; 0 if it exchanges none."""
    state = state_of(module)
    if state is None or state.heads is None or not state.uses_all_rows:
        return 0
    return border.tokens.ranks * state.heads.assignment.rows


def exchanges(applied: AppliedPlan, calls: Calls) -> Iterator[tuple[str, int]]:
    """Yield each exchange of tokens for heads that is needed, or back: the mixer, and the elements."""
    for path, mixer in within_mixers(applied).items():
        yield from ((mixer, exchanged_elements(call)) for call in calls.get(path, ()) if call.exchanged_rows)


def holder(module: str | None, names: Iterable[str | None]) -> str | None:
    """Return which of the modules `names` is `module`, or holds it."""
    return next((name for name in names if name and f"{module}.".startswith(f"{name}.")), None)
