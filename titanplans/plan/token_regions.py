"""Which regions of a plan mix tokens: those that context parallelism gives the whole sequence.

Mixers do, and whatever else in a block is a region; an MLP only where its forward takes what says which tokens belong
together. A tower's blocks, such as a vision encoder's, have tokens of their own, and are whole on every rank.
"""

import inspect

from torch import nn

from titanplans.plan.cache import CACHES
from titanplans.plan.decoder import within
from titanplans.plan.resolve import Entry, ResolvedPlan

_TELLS_TOKENS = ("attention_mask", "cu_seqlens", "state", *CACHES)
"""Arguments of an MLP that mixes a token with others, as RWKV's does with the one before."""


def token_regions(plan: ResolvedPlan) -> frozenset[str]:
    """Return the keys of the regions of `plan` that mix tokens."""
    mlps = {name: mlp for name, mlp in plan.decoder.mlps.items() if not _mixes_tokens(mlp)}
    apart = [*mlps, *(name for tower in plan.decoder.towers for name in tower)]
    return frozenset(
        entry.key
        for entry in plan.entries
        if entry.style.opens and not any(entry.key == name or within(entry.key, name) for name in apart)
    )


def region_of(entry: Entry, regions: frozenset[str], plan: ResolvedPlan) -> str | None:
    """Return the region in which `entry` stands, or that it opens; "" for a parameter that blocks read inside of one."""
    for region in regions:
        if entry.key == region or within(entry.key, region):
            return region
    for_blocks = entry.parameter is not None and entry.style.inside
    opened = (other.key for other in plan.entries if other.style.opens)
    return "" if for_blocks and not any(within(entry.key, key) for key in opened) else None


def _mixes_tokens(mlp: nn.Module) -> bool:
    return any(name in inspect.signature(mlp.forward).parameters for name in _TELLS_TOKENS)
