"""Which regions of a plan mix tokens: those that context parallelism gives the whole sequence.

The plan says it: `attn_input`, `attn_region` and `shared_region` do, `mlp_input` and `mlp_region` do not. A tower's blocks,
such as a vision encoder's, have tokens of their own, and are whole on every rank.
"""

from titanplans.plan.decoder import within
from titanplans.plan.resolve import Entry, ResolvedPlan
from titanplans.plan.styles.region import Region


def token_regions(plan: ResolvedPlan) -> frozenset[str]:
    """Return the keys of the regions of `plan` that mix tokens."""
    towers = [name for tower in plan.decoder.towers for name in tower]
    return frozenset(
        entry.key
        for entry in plan.entries
        if isinstance(entry.style, Region)
        and entry.style.mixes_tokens
        and not any(entry.key == name or within(entry.key, name) for name in towers)
    )


def region_of(entry: Entry, regions: frozenset[str], plan: ResolvedPlan) -> str | None:
    """Return the region in which `entry` stands, or that it opens; "" for a parameter that blocks read inside of one."""
    for region in regions:
        if entry.key == region or within(entry.key, region):
            return region
    for_blocks = entry.parameter is not None and entry.style.inside
    opened = (other.key for other in plan.entries if other.style.opens)
    return "" if for_blocks and not any(within(entry.key, key) for key in opened) else None
