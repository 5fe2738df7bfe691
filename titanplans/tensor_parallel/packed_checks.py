"""Packed projections that a plan splits as if they were one: where shapes say it, strict application suggests sections."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from titanplans.tensor_parallel.decoder import Decoder, within
from titanplans.tensor_parallel.projections import Colwise, Rowwise
from titanplans.tensor_parallel.styles import targets

if TYPE_CHECKING:
    from titanplans.tensor_parallel.plan import TPPlan


def packed_faults(
    plan: Mapping[str, ParallelStyle], model: nn.Module, decoder: Decoder, source: "TPPlan"
) -> Iterator[tuple[str, str]]:
    """Yield each `colwise` Linear whose rows are queries, keys and values together, or gate and up."""
    part_of = {key: name for name in (*decoder.mixers, *decoder.mlps) for key in plan if within(key, name)}
    widths = {
        part_of[key]: found.module.in_features
        for key, style, found in targets(plan, model)
        if key in part_of and isinstance(style, Rowwise) and isinstance(found.module, nn.Linear)
    }
    for key, style, found in targets(plan, model):
        if type(style) is not Colwise or style.interleaved or not isinstance(found.module, nn.Linear):
            continue
        rows, around = found.module.out_features, decoder.mixer_around(key)
        width = widths.get(part_of.get(key, ""))
        if around is not None and (sections := _attention(source, decoder.mixers[around], rows, width)):
            yield key, _advice(rows, sections, "queries, keys and values")
        elif around is None and width is not None and rows == 2 * width:
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
