"""Packed projections that a plan splits as if they were one: where shapes say it, strict application suggests sections."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import nn

from titanplans.plan.decoder import within
from titanplans.plan.resolve import ResolvedPlan
from titanplans.plan.styles.projections import Colwise, Rowwise

if TYPE_CHECKING:
    from titanplans.plan.plan import TPPlan


def packed_faults(plan: ResolvedPlan) -> Iterator[tuple[str, str]]:
    """Yield each `colwise` Linear whose rows are queries, keys and values together, or gate and up."""
    decoder = plan.decoder
    around = {
        e.key: name for name in (*decoder.mixers, *decoder.mlps) for e in plan.entries if within(e.key, name)
    }
    widths = {
        around[e.key]: e.module.in_features
        for e in plan.entries
        if e.key in around and isinstance(e.style, Rowwise) and isinstance(e.module, nn.Linear)
    }
    for key, style, _, module, *_ in plan.entries:
        if type(style) is not Colwise or style.interleaved or not isinstance(module, nn.Linear):
            continue
        rows, mixer = module.out_features, decoder.mixer_around(key)
        width = widths.get(around.get(key, ""))
        if mixer is not None and (sections := _attention(plan.source, decoder.mixers[mixer], rows, width)):
            yield key, _advice(rows, sections, "queries, keys and values")
        elif mixer is None and width is not None and rows == 2 * width:
            yield key, _advice(rows, (width, width), "gate and up")


def _attention(
    source: "TPPlan", mixer: nn.Module, rows: int, width: int | None
) -> tuple[int, int, int] | None:
    """Return the rows of queries, keys and values if together they are `rows`; `width` is that of the mixer's output."""
    plan = source.plan_of(mixer)
    counts, kv = plan.heads(mixer), plan.kv_heads(mixer)
    queries = next(iter(counts.values()), None)
    if queries is None:
        return None
    size = getattr(mixer, "head_dim", None) or (width or 0) // queries
    if not isinstance(size, int) or size == 0:
        return None
    kv = queries if kv is None else kv
    return (queries * size, kv * size, kv * size) if rows == (queries + 2 * kv) * size else None


def _advice(rows: int, sections: tuple[int, ...], what: str) -> str:
    return (
        f"its {rows} rows look like {what} packed into one projection, {' + '.join(map(str, sections))}, which even shards "
        f"would cut anywhere: write self.packed({', '.join(map(str, sections))}), or colwise(interleaved=True) where each "
        "head's rows of all sections follow each other"
    )
