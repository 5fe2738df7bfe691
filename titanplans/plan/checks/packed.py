"""Find, by their shapes, packed projections that a plan shards across section boundaries, and suggest sections."""

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from torch import nn

from titanplans.plan.resolve import Entry, ResolvedPlan
from titanplans.split.decoder import within
from titanplans.split.layout import Section
from titanplans.styles.base import direct_parameters

if TYPE_CHECKING:
    from titanplans.plan.plan import TPPlan


def packed_faults(plan: ResolvedPlan) -> Iterator[tuple[str, str]]:
    """Yield the key of each `colwise` weight that packs queries, keys and values, or gate and up, and advice about it."""
    yield from _experts(plan)
    yield from _convolutions(plan)
    decoder = plan.decoder
    container = {
        e.key: name for name in (*decoder.mixers, *decoder.mlps) for e in plan.entries if within(e.key, name)
    }
    widths = {
        container[e.key]: e.module.in_features
        for e in plan.entries
        if e.key in container and e.style.makes_partial_sum and isinstance(e.module, nn.Linear)
    }
    for entry in plan.entries:
        key, module = entry.key, entry.module
        if not entry.style.ignores_sections or not isinstance(module, nn.Linear):
            continue
        rows, mixer = module.out_features, decoder.mixer_around(key)
        width = widths.get(container.get(key, ""))
        if mixer is not None and (sections := _attention(plan.source, decoder.mixers[mixer], rows, width)):
            yield key, _advice(rows, sections, "queries, keys and values")
        elif mixer is None and width is not None and rows == 2 * width:
            yield key, _advice(rows, (width, width), "gate and up")


def _experts(plan: ResolvedPlan) -> Iterator[tuple[str, str]]:
    """Yield each 3-D weight of experts that is twice as wide as the experts' down projection: it seems to pack gate and
    up."""
    stacked = [
        e
        for e in plan.entries
        if e.parameter in direct_parameters(e.module) and getattr(e.module, e.parameter).ndim == 3
    ]
    widths = {e.path: _rows(e) for e in stacked if e.style.makes_partial_sum}
    for entry in stacked:
        width = widths.get(entry.path)
        if entry.style.ignores_sections and width and _rows(entry) == 2 * width:
            yield entry.key, _advice(2 * width, (width, width), "gate and up", entry.style.dim)  # type: ignore[attr-defined]


def _convolutions(plan: ResolvedPlan) -> Iterator[tuple[str, str]]:
    """Yield each convolution over consecutive sections of a packed projection of its mixer."""
    for entry in plan.entries:
        mixer = plan.decoder.mixer_around(entry.key)
        if not entry.style.ignores_sections or mixer is None:
            continue
        for other in plan.entries if isinstance(entry.module, nn.Conv1d) else ():
            rows = _rows(entry)
            if within(other.key, mixer) and (sections := _span(other.style.sections, rows)):
                yield entry.key, _advice(rows, sections, f"sections of {other.key}")


def _span(sections: Sequence[Section], rows: int) -> Sequence[Section]:
    """Return consecutive sections whose sizes add up to `rows`; () if there are none, or if one section has this size."""
    sizes = [section if isinstance(section, int) else section.size for section in sections]
    ends = itertools.combinations(range(len(sizes) + 1), 2)
    spans = (sections[first:end] for first, end in ends if sum(sizes[first:end]) == rows)
    return () if rows in sizes else next(spans, ())


def _rows(entry: Entry) -> int:
    return direct_parameters(entry.module)[entry.parameter or "weight"].shape[entry.style.dim]  # type: ignore[attr-defined]


def _attention(
    source: "TPPlan", mixer: nn.Module, rows: int, width: int | None
) -> tuple[int, int, int] | None:
    """Return the row counts of queries, keys and values if they add up to `rows`; `width`: the queries' count, if known."""
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


def _advice(rows: int, sections: Sequence[Section], what: str, dim: int = 0) -> str:
    sizes = [str(s) if isinstance(s, int) else f"self.shared_heads({s.size}, {s.heads})" for s in sections]
    return (
        f"its {rows} rows look like {what} packed into one projection, "
        f"{' + '.join(str(s if isinstance(s, int) else s.size) for s in sections)}, which even shards would split "
        f"across section boundaries: write self.packed({', '.join(sizes)}{f', dim={dim}' if dim else ''}), or the "
        "sections into which its code splits it, or colwise(interleaved=True) if all rows of a head are adjacent"
    )
