"""The parallelism report: how a model was made parallel, and how one training step communicated and compiled.

    report = parallelism_report(...)            # titanplans.parallel.report, once the model is parallel
    with report.measuring(step=1):
        ...                                     # a whole training step
    report.values                               # plain dicts, lists, numbers: docs/observe.md

Its values are read off the model, counted as they happen, or given by torch. A field that can't be known is None,
and `reasons` says why: a failure of the observer never ends the run. When the report is written is the
training loop's matter, in which words it is logged `summary`'s.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from titanplans.observe.compilation import (
    CompileRecord,
    check_compiled,
    check_outside_blocks,
    check_still_compiled,
    outside_blocks,
    record_compilation,
)
from titanplans.observe.guard import Guard, reason
from titanplans.observe.operators import Collective
from titanplans.observe.places import RowRanges
from titanplans.observe.recorder import CollectiveRecord, record_collectives
from titanplans.plan.decoder import Decoder
from titanplans.text import class_name
from titanplans.torch_private.modules import ActivationWrapper, checkpointed

SCHEMA = 2
"""Of the report: counted up when a key changes its meaning or goes."""

_OF_DATA = ("fsdp", "dp_replicate", "dp", "dp_cp")
"""Names of meshes over which gradients are summed; of two over the same ranks the first names them."""

_OF_MODEL = ("tp", "cp", "ep", "pp")
"""Names of meshes over which the model's own code communicates."""

_Row = tuple[tuple[str, Any], ...]


class ParallelismReport:
    """The report on one model; `measuring` fills in the part of a step.

    Args:
        model: parallelised.
        mesh: a `Mesh`, or torchtitan's ParallelDims.
        decoder: its parts.
        done: the static fields: each one's name, and the function that reads it. The field `compile`, where it is not
            None, has the `components` that were to be compiled.

    Attributes:
        values: the report.

    Raises:
        ParallelError: a block that was to be compiled is not.
    """

    def __init__(self, model: nn.Module, mesh: Any, decoder: Decoder, done: Mapping[str, Callable[[], Any]]):
        self.model, self.mesh = model, mesh
        self._towers = [name for names in decoder.towers for name in names]
        self.blocks = [*decoder.names, *self._towers]
        self.reasons: dict[str, str] = {}
        self.values: dict[str, Any] = {
            "schema": SCHEMA,
            "measured_after_step": None,
            "torch": torch.__version__,
        }
        for name, read in {**done, "meshes": self._meshes}.items():
            self._fill((name,), lambda name=name, read=read: {name: read()})
        if self._to_compile("model"):
            check_still_compiled(model, self.blocks)
        self.not_measured("no step was measured yet")
        self.values["reasons"] = self.reasons

    def not_measured(self, why: str) -> None:
        """State why there is no step in the report."""
        self._unknown(("step", "blocks", "other_modules", "graphs"), why)
        if self.values["compile"] is None:
            self.reasons.pop("graphs")  # there are none

    @contextmanager
    def measuring(self, step: int) -> Iterator[CollectiveRecord]:
        """Measure the training step that runs inside, and put it into the report; on every rank, or on none.

        The step computes the same, a little slower; nothing stays in the model.

        Args:
            step: its number, for the report.

        Raises:
            ParallelError: a component that was to be compiled ran eagerly.
        """
        compilation = None
        with ExitStack() as stack:
            record = stack.enter_context(record_collectives(self.model))
            if self.values["compile"] is not None and record.places is not None:
                compilation = stack.enter_context(record_compilation(record.places))
            yield record
        self.values["measured_after_step"] = step
        self._fill(
            ("step", "blocks", "other_modules"), lambda: self._communication(record), record.guard.failure
        )
        if self.values["compile"] is not None:
            self._compilation(record, compilation)

    def _compilation(self, record: CollectiveRecord, compilation: CompileRecord | None) -> None:
        """Check the components that were to be compiled, as far as the step was recorded, and fill in the graphs."""
        failure, places = record.guard.failure, record.places
        if failure is not None or places is None or compilation is None:
            self._fill(("graphs",), dict, failure)
            return
        failure = compilation.guard.failure
        if failure is None:
            if self._to_compile("model"):
                check_compiled(self.blocks, self._towers, places, compilation)
            components = [n for n in ("loss", "optimizer") if self._to_compile(n)]
            check_outside_blocks(compilation, components, self.blocks)
        self._fill(("graphs",), lambda: {"graphs": self._graphs(places, compilation)}, failure)

    def _to_compile(self, component: str) -> bool:
        options = self.values["compile"]
        return options is not None and component in options["components"]

    def _fill(
        self, names: tuple[str, ...], read: Callable[[], dict[str, Any]], failure: Exception | None = None
    ) -> None:
        """Put what `read` returns into the report; None and the reason where it fails, or the recorder had a `failure`."""
        guard = Guard()
        guard.failure = failure
        found = guard(read)
        if guard.failure is not None:
            self._unknown(names, reason(guard.failure))
            return
        self.values |= found
        for name in names:
            self.reasons.pop(name, None)

    def _unknown(self, names: tuple[str, ...], why: str) -> None:
        self.values |= dict.fromkeys(names)
        self.reasons |= dict.fromkeys(names, why)

    def _meshes(self) -> dict[str, Any]:
        return {
            name: {"ranks": found.size(), "backend": dist.get_backend(found.get_group())}
            for name, found in self._named_meshes()
        }

    def _named_meshes(self) -> list[tuple[str, Any]]:
        """The 1-D meshes of more than one rank; of several of data over the same ranks, the first."""
        found: dict[tuple[Any, ...], tuple[str, Any]] = {}
        for axis in (*_OF_DATA, *_OF_MODEL):
            # There may be no mesh of experts, and of FSDP one that DDP does not use.
            if (axis == "ep" and self.mesh.ep == 1) or (axis == "fsdp" and self.values["strategy"] == "ddp"):
                continue
            # torchtitan's names of two of them.
            one = self.mesh.get_optional_mesh({"dp": "batch", "dp_cp": "loss"}.get(axis, axis))
            if one is not None and one.size() > 1:
                found.setdefault((_ranks(one), axis in _OF_MODEL and axis), (axis, one))
        return list(found.values())

    def _communication(self, record: CollectiveRecord) -> dict[str, Any]:
        """The step's communication: in all (`step`), each kind of block (`blocks`), and `other_modules`."""
        groups = {name: _ranks(mesh) for name, mesh in self._named_meshes()}
        groups["world"] = tuple(range(dist.get_world_size()))
        found = [_Issued(c, self._group(c, groups), self._part(c.module)) for c in record.collectives]
        every_step = [c for c in found if c.phase != "log"]
        step: dict[str, Any] = _sums(every_step)
        for name in ("group", "phase", "operation"):
            values = dict.fromkeys(getattr(c, name) for c in every_step)
            step[f"by_{name}"] = {v: _sums(c for c in every_step if getattr(c, name) == v) for v in values}
        step["log"] = _sums(c for c in found if c.phase == "log")
        kinds: dict[tuple[str, tuple[_Row, ...]], list[str]] = {}
        for block in self.blocks:
            rows = _rows(c for c in every_step if c.part == block)
            kinds.setdefault((self._class(block), rows), []).append(block)
        others = dict.fromkeys(c.part for c in every_step if c.part not in self.blocks)
        return {
            "step": step,
            "blocks": [
                {"class": kind, "names": names, "collectives": [dict(row) for row in rows]}
                for (kind, rows), names in kinds.items()
            ],
            "other_modules": [
                {
                    "name": part,
                    "collectives": [dict(row) for row in _rows(c for c in every_step if c.part == part)],
                }
                for part in others
            ],
        }

    def _group(self, collective: Collective, groups: Mapping[str, tuple[int, ...]]) -> str:
        """The name of the mesh for whose sake `collective` is issued, where several have the same ranks."""
        experts = (self.values["expert_parallel"] or {}).get("experts", ())
        of_experts = any(f"{collective.module}.".startswith(f"{held}.") for held in experts)
        of_model = [*(["ep"] if of_experts else []), *_OF_MODEL]
        # DDP sums buckets, outside of any module; no gradient is summed by an all-to-all.
        by_data = collective.of_unit or (collective.module is None and collective.operation != "all_to_all")
        order = [*_OF_DATA, *of_model] if by_data else [*of_model, *_OF_DATA]
        named = {name: groups[name] for name in (*order, "world") if name in groups}
        ranks = set(collective.group)
        return next((name for name, held in named.items() if ranks == set(held)), None) or next(
            f"part of {name}" for name, held in named.items() if ranks <= set(held)
        )

    def _part(self, module: str | None) -> str | None:
        """The block that the module stands in, or else its own name; None for the model itself, and outside."""
        return next((b for b in self.blocks if f"{module}.".startswith(f"{b}.")), module or None)

    def _graphs(self, places: RowRanges, record: CompileRecord) -> dict[str, Any]:
        """The compiler's graphs: of the blocks, class by class, and outside of them."""
        kinds: dict[str, list[str]] = {}
        for block in self.blocks if self._to_compile("model") else ():
            kinds.setdefault(self._class(block), []).append(block)
        tables = []
        for kind, names in kinds.items():
            made = [record.by_module[name] for name in names if name in record.by_module]
            breaks: Counter[str] = sum((entry.breaks for entry in made), Counter())
            tables.append(
                {
                    "class": kind,
                    "blocks": len(names),
                    "ran_compiled": sum(places.calls[name] > 0 for name in names),
                    "graphs": sum(entry.graphs for entry in made),
                    "graph_breaks": breaks.total(),
                    "break_reasons": dict(breaks),
                    "recompilations": sum(entry.recompilations for entry in made),
                    "left_eager": sorted({why for entry in made for why in entry.failures}),
                }
            )
        return {"blocks": tables, "outside_blocks": outside_blocks(record, self.blocks).graphs}

    def _class(self, block: str) -> str:
        module = self.model.get_submodule(block)
        while isinstance(module, ActivationWrapper):
            module = checkpointed(module)
        return class_name(module).removeprefix("FSDP")


class _Issued:
    """A collective in the report's words."""

    def __init__(self, collective: Collective, group: str, part: str | None):
        self.operation, self.phase, self.fused = collective.operation, collective.phase, collective.fused
        self.bytes = collective.received or 0
        self.part, self.group = part, group


def _ranks(mesh: Any) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(mesh.get_group()))


def _sums(collectives: Iterable[_Issued]) -> dict[str, int]:
    found = list(collectives)
    return {
        "collectives": len(found),
        "bytes": sum(c.bytes for c in found),
        "fused": sum(c.fused for c in found),
    }


def _rows(collectives: Iterable[_Issued]) -> tuple[_Row, ...]:
    """Equal collectives as one row, in the order of the first; a row is a dict's items, so that tables compare."""
    rows: dict[tuple[Any, ...], list[int]] = {}
    for c in collectives:
        row = rows.setdefault((c.phase, c.operation, c.group, c.fused), [0, 0])
        row[0] += 1
        row[1] += c.bytes
    keys = ("phase", "operation", "group", "fused", "count", "bytes")
    return tuple(tuple(zip(keys, (*row, *counts), strict=True)) for row, counts in rows.items())
