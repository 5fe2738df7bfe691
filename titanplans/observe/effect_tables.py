"""The tables of what a step did, for the report of what took effect (`effect`): equal blocks and equal collectives as one.

Plain dicts, lists and numbers; what they mean is in docs/what-took-effect.md.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper
from torch.distributed.fsdp import FSDPModule

from titanplans.observe.collective_record import Collective, Record
from titanplans.observe.compile_record import CompileRecord
from titanplans.observe.step_places import Places

_Row = tuple[tuple[str, Any], ...]


def communication(model: nn.Module, blocks: Sequence[str], record: Record) -> dict[str, Any]:
    """Return what a step communicated: in all (`step`), each kind of block (`blocks`), and `beside_blocks`.

    Args:
        model: the model.
        blocks: fully qualified names of its blocks.
        record: of the step.
    """
    every_step = [c for c in record.collectives if c.phase != "log"]
    step: dict[str, Any] = _sums(every_step)
    for name in ("group", "phase", "operation"):
        values = dict.fromkeys(getattr(c, name) for c in every_step)
        step[f"by_{name}"] = {v: _sums(c for c in every_step if getattr(c, name) == v) for v in values}
    step |= {"log": _sums(c for c in record.collectives if c.phase == "log"), "reason": None}
    if record.unknown:
        names = ", ".join(sorted(set(record.unknown)))
        step |= {"collectives": None, "bytes": None, "reason": f"nobody here knows what {names} sends"}
    kinds: dict[tuple[str, tuple[_Row, ...]], list[str]] = {}
    for block in blocks:
        rows = _rows(c for c in every_step if c.place == block)
        kinds.setdefault((_class(model, block), rows), []).append(block)
    beside = dict.fromkeys(c.place for c in every_step if c.place not in blocks)
    return {
        "step": step,
        "blocks": [
            {"class": kind, "names": names, "collectives": [dict(row) for row in rows]}
            for (kind, rows), names in kinds.items()
        ],
        "beside_blocks": [
            {
                "name": place,
                "collectives": [dict(row) for row in _rows(c for c in every_step if c.place == place)],
            }
            for place in beside
        ],
    }


def graphs(
    model: nn.Module, blocks: Sequence[str], places: Places, compilation: CompileRecord
) -> list[dict[str, Any]]:
    """Return what became of the compiled `blocks`, class by class."""
    kinds: dict[str, list[str]] = {}
    for block in blocks:
        kinds.setdefault(_class(model, block), []).append(block)
    tables = []
    for kind, names in kinds.items():
        made = [compilation[name] for name in names if name in compilation]
        reasons: Counter[str] = sum((entry.breaks for entry in made), Counter())
        tables.append(
            {
                "class": kind,
                "blocks": len(names),
                "ran_compiled": sum(places.calls[name] > 0 for name in names),
                "graphs": sum(entry.graphs for entry in made),
                "graph_breaks": reasons.total(),
                "break_reasons": dict(reasons),
                "recompilations": sum(entry.again for entry in made),
                "left_eager": sorted({reason for entry in made for reason in entry.failures}),
            }
        )
    return tables


def _sums(collectives: Iterable[Collective]) -> dict[str, int]:
    found = list(collectives)
    return {
        "collectives": len(found),
        "bytes": sum(c.received for c in found),
        "fused": sum(c.fused for c in found),
    }


def _rows(collectives: Iterable[Collective]) -> tuple[_Row, ...]:
    """Equal collectives as one row, in the order of the first; a row is a dict's items, so that tables compare."""
    rows: dict[tuple[Any, ...], list[int]] = {}
    for c in collectives:
        row = rows.setdefault((c.phase, c.operation, c.group, c.fused), [0, 0])
        row[0] += 1
        row[1] += c.received
    keys = ("phase", "operation", "group", "fused", "count", "bytes")
    return tuple(tuple(zip(keys, (*row, *counts), strict=True)) for row, counts in rows.items())


def _class(model: nn.Module, block: str) -> str:
    module = model.get_submodule(block)
    while isinstance(module, ActivationWrapper):
        module = module._checkpoint_wrapped_module  # pyrefly: ignore[bad-assignment]
    return next(cls.__name__ for cls in type(module).__mro__ if not issubclass(cls, FSDPModule))
