"""The parallelism report: how a model was made parallel, and how one training step communicated and compiled.

    report = ParallelismReport(model, mesh, config)     # once the model is parallel
    with report.measuring(step=1):
        ...                                             # a whole training step
    report.values                                       # plain dicts, lists, numbers: docs/observe.md

Its values are read off the model, counted as they happen, or given by torch. A step with an operator whose bytes can't be
counted is None, and `reasons` names it. The training loop writes the report; `titanplans.observe.summary` puts it in words.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from titanplans.apply.apply import AppliedPlan
from titanplans.config import DDPConfig, Strategy
from titanplans.observe.compilation import (
    CompileRecord,
    check_compiled,
    check_outside_blocks,
    check_still_compiled,
    is_compiled,
    record_compilation,
)
from titanplans.observe.operators import Collective
from titanplans.observe.recorder import CollectiveRecord, record_collectives
from titanplans.observe.tracker import ModuleTracker, fsdp_units
from titanplans.parallel.activation_checkpoint import Kept, memory_budget
from titanplans.parallel.mesh.cuts import shard_mesh
from titanplans.parallel.record import ParallelRecord, record_of
from titanplans.precision.float8.report import float8_report
from titanplans.split.decoder import find_decoder
from titanplans.text import class_name
from titanplans.torch_private.modules import ActivationWrapper, checkpointed

SCHEMA = 2
"""Of the report: counted up when a key changes its meaning or goes."""

_DEGREES = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")

_OF_DATA = ("fsdp", "dp_replicate", "dp", "dp_cp")
"""Names of meshes over which gradients are summed; of two over the same ranks the first names them."""

_OF_MODEL = ("tp", "cp", "ep", "pp")
"""Names of meshes over which the model's own code communicates."""

_OF_STEP = ("step", "blocks", "other_modules", "graphs")


class ParallelismReport:
    """The report on one model, in `values`; `measuring` fills in the part of a step.

    Args:
        model: parallelised; under DDP with its values. A stage of a pipeline is reported as a model; the "step" counts what
            the other stages of this process communicate, too, as of no module.
        mesh: a `Mesh`, or torchtitan's ParallelDims.
        config: the strategy that was applied.

    Raises:
        ParallelError: a block that was to be compiled is not.
    """

    def __init__(self, model: nn.Module, mesh: Any, config: Strategy):
        self.model, self.mesh = model, mesh
        record = record_of(model)
        decoder = record.plan.decoder if record.plan is not None else find_decoder(model)
        self._towers = [name for names in decoder.towers for name in names]
        self.blocks = [*decoder.names, *self._towers]
        self.values: dict[str, Any] = {
            "schema": SCHEMA,
            "measured_after_step": None,
            "torch": torch.__version__,
            "strategy": config.title,
            "world_size": dist.get_world_size(),
            "degrees": {name: getattr(mesh, name) for name in _DEGREES},
            "steps_taken": list(record.steps),
            **_plan(record.plan),
            "float8": float8_report(model, record.float8, record.plan.crossings if record.plan else {}),
            "adapters": _adapters(record),
            "pipeline": None,  # the training loop's, which has all stages
            "recomputation": _recomputation(model, self.blocks, record),
            "compile": _compile(model, self.blocks, config),
            "autocast": getattr(config, "autocast_dtype", None),
            "data_parallel": _data_parallel(model, mesh, config),
        }
        self.values["meshes"] = {
            name: {"ranks": found.size(), "backend": dist.get_backend(found.get_group())}
            for name, found in self._named_meshes()
        }
        if self._to_compile("model"):
            check_still_compiled(model, self.blocks)
        self.not_measured("no step was measured yet")

    def not_measured(self, why: str) -> None:
        """State why there is no step in the report."""
        self.values |= dict.fromkeys(_OF_STEP)
        unknown = _OF_STEP if self.values["compile"] is not None else _OF_STEP[:-1]
        self.values["reasons"] = dict.fromkeys(unknown, why)

    @contextmanager
    def measuring(self, step: int) -> Iterator[CollectiveRecord]:
        """Measure the training step that runs inside, and put it into the report; on every rank, or on none.

        The step computes the same, a little slower; nothing stays in the model.

        Raises:
            ParallelError: a component that was to be compiled ran eagerly.
        """
        compilation = None
        with ExitStack() as stack:
            record = stack.enter_context(record_collectives(self.model))
            if self.values["compile"] is not None:
                compilation = stack.enter_context(record_compilation(record.places))
            yield record
        self.values["measured_after_step"] = step
        if record.failure is not None:
            self.not_measured(record.failure)
            return
        self.values |= self._communication(record) | {"reasons": {}}
        if compilation is not None:
            if self._to_compile("model"):
                check_compiled(self.blocks, self._towers, record.places, compilation)
            stage = record_of(self.model).stage
            made = ("loss", "optimizer") if stage is None or not stage.gives else ("optimizer",)
            components = [name for name in made if self._to_compile(name)]
            check_outside_blocks(compilation, components, self.blocks)
            self.values["graphs"] = self._graphs(record.places, compilation)

    def _to_compile(self, component: str) -> bool:
        return component in (self.values["compile"] or {"components": ()})["components"]

    def _named_meshes(self) -> list[tuple[str, Any]]:
        """The 1-D meshes of more than one rank; of several of data over the same ranks, the first."""
        found: dict[tuple[Any, ...], tuple[str, Any]] = {}
        for axis in (*_OF_DATA, *_OF_MODEL):
            # There may be no mesh of experts, and of FSDP one that DDP does not use.
            if (axis == "ep" and self.mesh.ep == 1) or (axis == "fsdp" and self.values["strategy"] == "ddp"):
                continue
            if axis == "pp":  # torchtitan's trainer is told of none
                one = self.mesh.get_mesh("pp") if self.mesh.pp > 1 else None
            elif axis == "fsdp":
                one = shard_mesh(self.mesh)
            else:
                # torchtitan's names of two of them.
                one = self.mesh.get_optional_mesh({"dp": "batch", "dp_cp": "loss"}.get(axis, axis))
            if one is not None and one.size() > 1:
                found.setdefault((_ranks(one), axis in _OF_MODEL and axis), (axis, one))
        return list(found.values())

    def _communication(self, record: CollectiveRecord) -> dict[str, Any]:
        """The step's communication: in all (`step`), each kind of block (`blocks`), and `other_modules`."""
        groups = {name: _ranks(mesh) for name, mesh in self._named_meshes()}
        groups["world"] = tuple(range(dist.get_world_size()))
        every_step = [(c, self._group(c, groups)) for c in record.collectives if c.phase != "log"]
        step: dict[str, Any] = _sums(c for c, _ in every_step)
        for key in ("group", "phase", "operation"):
            held: dict[str, list[Collective]] = {}
            for c, group in every_step:
                held.setdefault(group if key == "group" else getattr(c, key), []).append(c)
            step[f"by_{key}"] = {value: _sums(those) for value, those in held.items()}
        step["log"] = _sums(c for c in record.collectives if c.phase == "log")
        parts: dict[str | None, list[tuple[Collective, str]]] = {block: [] for block in self.blocks}
        for c, group in every_step:
            # The block that the module stands in, or else its own name; None for the model itself, and outside.
            inside = next((b for b in self.blocks if f"{c.module}.".startswith(f"{b}.")), c.module or None)
            parts.setdefault(inside, []).append((c, group))
        kinds: list[dict[str, Any]] = []
        for block in self.blocks:
            name, rows = self._class(block), _rows(parts.pop(block))
            same = next((k for k in kinds if (k["class"], k["collectives"]) == (name, rows)), None)
            if same is None:
                kinds.append({"class": name, "names": [block], "collectives": rows})
            else:
                same["names"].append(block)
        others = [{"name": name, "collectives": _rows(issued)} for name, issued in parts.items()]
        return {"step": step, "blocks": kinds, "other_modules": others}

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

    def _graphs(self, places: ModuleTracker, record: CompileRecord) -> dict[str, Any]:
        """The compiler's graphs: of the blocks, class by class, and outside of them."""
        kinds: dict[str, list[str]] = {}
        for block in self.blocks if self._to_compile("model") else ():
            kinds.setdefault(self._class(block), []).append(block)
        tables = []
        for kind, names in kinds.items():
            made = [record.of(name) for name in names]
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
        return {"blocks": tables, "outside_blocks": record.outside(self.blocks).graphs}

    def _class(self, block: str) -> str:
        module = self.model.get_submodule(block)
        while isinstance(module, ActivationWrapper):
            module = checkpointed(module)
        return class_name(module).removeprefix("FSDP")


def _ranks(mesh: Any) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(mesh.get_group()))


def _sums(collectives: Iterable[Collective]) -> dict[str, int]:
    found = list(collectives)
    return {
        "collectives": len(found),
        "bytes": sum(c.received or 0 for c in found),
        "fused": sum(c.fused for c in found),
    }


def _rows(collectives: Iterable[tuple[Collective, str]]) -> list[dict[str, Any]]:
    """Equal collectives as one row, in the order of the first."""
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for c, group in collectives:
        words = {"phase": c.phase, "operation": c.operation, "group": group, "fused": c.fused}
        row = rows.setdefault(tuple(words.values()), words | {"count": 0, "bytes": 0})
        row["count"] += 1
        row["bytes"] += c.received or 0
    return list(rows.values())


def _plan(applied: AppliedPlan | None) -> dict[str, Any]:
    """The fields of the plan's cuts: by weights, by tokens, by experts; None where it does not cut so."""
    fields: dict[str, Any] = dict.fromkeys(("tensor_parallel", "context_parallel", "expert_parallel"))
    if applied is None:
        return fields
    options = applied.plan.options
    plan = {
        "plan": type(applied.plan).__name__,
        "styles": dict(Counter(type(style).__name__ for style in applied.styles.values())),
    }
    if options.degrees.tp > 1:
        names = ("sequence_parallel", "loss_parallel")
        fields["tensor_parallel"] = plan | {name: getattr(options, name) for name in names}
    if options.degrees.cp > 1:
        fields["context_parallel"] = plan | {"regions": sorted(applied.resolved.token_regions)}
    if options.degrees.ep > 1:
        experts = [entry.key for entry in applied.resolved.entries if entry.style.splits_by_experts]
        fields["expert_parallel"] = plan | {"experts": experts}
    return fields


def _adapters(record: ParallelRecord) -> dict[str, Any] | None:
    done = record.adapters
    if done is None:
        return None
    return {
        **{name: getattr(done.options, name) for name in ("rank", "alpha", "dropout", "quantize_base")},
        "modules": list(done.modules),
        "left_out": dict(done.left),
        "modules_to_save": list(done.saved),
        "unfused": list(done.unfused),
        "trained": done.trained,
        "frozen": done.frozen,
    }


def _recomputation(model: nn.Module, blocks: list[str], record: ParallelRecord) -> dict[str, Any] | None:
    recomputed, kept = set(), 0
    for block in blocks:
        for module in model.get_submodule(block).modules():
            kept += isinstance(module, Kept)
            wrapped = isinstance(module, ActivationWrapper) and not isinstance(module, Kept)
            recomputed |= {block} if wrapped or memory_budget(module) is not None else set()
    if not recomputed:
        return None
    return {"policy": record.policy, "blocks": len(recomputed), "of": len(blocks), "kept_mixers": kept}


def _compile(model: nn.Module, blocks: list[str], config: Strategy) -> dict[str, Any] | None:
    options = getattr(config, "compile", None)
    if options is None or not options.enable:
        return None
    return {
        "components": list(options.components),
        "blocks": sum(is_compiled(model.get_submodule(block)) for block in blocks),
        "of": len(blocks),
        **{name: getattr(options, name) for name in ("backend", "mode", "fullgraph", "dynamic")},
        "async_tensor_parallel": getattr(config, "enable_async_tensor_parallel", False),
    }


def _data_parallel(model: nn.Module, mesh: Any, config: Strategy) -> dict[str, Any]:
    common = {"shards": mesh.dp_shard * mesh.cp, "copies": mesh.dp_replicate}
    if isinstance(config, DDPConfig):
        return {"kind": "DDP", **common, "bucket_cap_mb": config.bucket_cap_mb}
    units = fsdp_units(model)
    if not units:
        return {"kind": config.title, **common}
    policy = units[0][1].mp_policy
    return {
        "kind": "FSDP2",
        **common,
        "units": len(units),
        "unit_names": [name for name, _ in units],
        "param_dtype": _dtype(policy.param_dtype),
        "reduce_dtype": _dtype(policy.reduce_dtype or policy.param_dtype),
        "cpu_offload": getattr(config, "enable_cpu_offload", False),
    }


def _dtype(dtype: torch.dtype | None) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")
