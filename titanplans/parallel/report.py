"""The parallelism report: how a model was parallelised, and what one training step communicated and compiled.

    report = ParallelismReport(model, mesh, config)     # after the model is parallelised
    with report.measuring(step=1):
        ...                                             # one training step
    report.values                                       # plain dicts, lists, numbers: docs/observe.md

The training loop writes the report to a file; `titanplans.observe.summary` formats it as text.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property
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
from titanplans.parallel.mesh.submeshes import shard_mesh
from titanplans.parallel.record import ParallelRecord, record_of
from titanplans.precision.float8.report import float8_report
from titanplans.split.decoder import find_decoder
from titanplans.text import class_name
from titanplans.torch_private.fsdp import mixed_precision
from titanplans.torch_private.modules import ActivationWrapper, checkpointed

SCHEMA = 2
"""Version of the report's keys: incremented when a key is removed or changes its meaning."""

_DEGREES = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")

_DATA_MESHES = ("fsdp", "dp_replicate", "dp", "dp_cp")
"""Names of meshes over which gradients are summed; if two have the same ranks, the report has the first name."""

_MODEL_MESHES = ("tp", "cp", "ep", "pp")
"""Names of meshes over which the model's forward and backward communicate."""

STEP_KEYS = ("step", "blocks", "other_modules", "graphs")
"""The keys that a measured step sets, besides "measured_after_step" and "reasons"."""


class ParallelismReport:
    """The report on one model, in `values`; `measuring` adds the keys of a training step.

    The keys of a step are None if it was not measured, or if it ran an operator whose bytes can't be counted; `reasons`
    then says why.

    Args:
        model: a parallelised model; with DDP it is no longer on meta. A pipeline stage is reported as if it were a model.
            If this process has other stages, "step" also counts their communication, which belongs to no module.
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
            "pipeline": None,  # filled in by the training loop, which has all stages
            "recomputation": _recomputation(model, self.blocks, record),
            "compile": _compile(model, self.blocks, config),
            "autocast": getattr(config, "autocast_dtype", None),
            "data_parallel": _data_parallel(model, mesh, config),
        }
        self.values["meshes"] = {
            name: {"ranks": named.size(), "backend": dist.get_backend(named.get_group())}
            for name, named in self._named_meshes()
        }
        if self._to_compile("model"):
            check_still_compiled(model, self.blocks)
        self.not_measured("no step was measured yet")

    def not_measured(self, why: str) -> None:
        """Set the keys of a step to None, and their reason to `why`."""
        self.values |= dict.fromkeys(STEP_KEYS)
        unknown = STEP_KEYS if self.values["compile"] is not None else STEP_KEYS[:-1]
        self.values["reasons"] = dict.fromkeys(unknown, why)

    @contextmanager
    def measuring(self, step: int) -> Iterator[CollectiveRecord]:
        """Measure the training step in the body, and add it to the report. Measure it on every rank, or on none.

        Measuring slows the step down, but does not change its results. All hooks are removed afterwards.

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
            candidates = ("loss", "optimizer") if stage is None or not stage.gives else ("optimizer",)
            components = [name for name in candidates if self._to_compile(name)]
            check_outside_blocks(compilation, components, self.blocks)
            self.values["graphs"] = self._graphs(record.places, compilation)

    def _to_compile(self, component: str) -> bool:
        return component in (self.values["compile"] or {"components": ()})["components"]

    def _named_meshes(self) -> list[tuple[str, Any]]:
        """The 1-D meshes of more than one rank, by name. Of data-parallel meshes with the same ranks only the first is
        kept."""
        meshes: dict[tuple[Any, ...], tuple[str, Any]] = {}
        for axis in (*_DATA_MESHES, *_MODEL_MESHES):
            # A mesh "ep" exists only above degree 1, and DDP does not use the mesh "fsdp".
            if (axis == "ep" and self.mesh.ep == 1) or (axis == "fsdp" and self.values["strategy"] == "ddp"):
                continue
            if axis == "pp":  # ParallelDims may have no mesh "pp" of size 1
                mesh = self.mesh.get_mesh("pp") if self.mesh.pp > 1 else None
            elif axis == "fsdp":
                mesh = shard_mesh(self.mesh)
            else:
                # ParallelDims' names of two meshes.
                mesh = self.mesh.get_optional_mesh({"dp": "batch", "dp_cp": "loss"}.get(axis, axis))
            if mesh is not None and mesh.size() > 1:
                meshes.setdefault((_ranks(mesh), axis in _MODEL_MESHES and axis), (axis, mesh))
        return list(meshes.values())

    def _communication(self, record: CollectiveRecord) -> dict[str, Any]:
        """The step's communication: total (`step`), by kind of block (`blocks`), and by other module (`other_modules`)."""
        every_step = [(c, self.mesh_of(c)) for c in record.collectives if c.phase != "log"]
        step: dict[str, Any] = _sums(c for c, _ in every_step)
        for key in ("group", "phase", "operation"):
            by_value: dict[str, list[Collective]] = {}
            for c, group in every_step:
                by_value.setdefault(group if key == "group" else getattr(c, key), []).append(c)
            step[f"by_{key}"] = {value: _sums(collectives) for value, collectives in by_value.items()}
        step["log"] = _sums(c for c in record.collectives if c.phase == "log")
        by_module: dict[str | None, list[tuple[Collective, str]]] = {block: [] for block in self.blocks}
        for c, group in every_step:
            # The block that contains the module, else the module; None for the model itself and outside of modules.
            name = next((b for b in self.blocks if f"{c.module}.".startswith(f"{b}.")), c.module or None)
            by_module.setdefault(name, []).append((c, group))
        kinds: list[dict[str, Any]] = []
        for block in self.blocks:
            cls, table = self._class(block), _count_equal(by_module.pop(block))
            equal_kind = next((k for k in kinds if (k["class"], k["collectives"]) == (cls, table)), None)
            if equal_kind is None:
                kinds.append({"class": cls, "names": [block], "collectives": table})
            else:
                equal_kind["names"].append(block)
        others = [{"name": name, "collectives": _count_equal(issued)} for name, issued in by_module.items()]
        return {"step": step, "blocks": kinds, "other_modules": others}

    @cached_property
    def _groups(self) -> dict[str, tuple[int, ...]]:
        groups = {name: _ranks(mesh) for name, mesh in self._named_meshes()}
        return groups | {"world": tuple(range(dist.get_world_size()))}

    def mesh_of(self, collective: Collective) -> str:
        """Return the name of the mesh that `collective` communicates over; if several have its ranks, the most likely
        one."""
        experts = (self.values["expert_parallel"] or {}).get("experts", ())
        in_experts = any(f"{collective.module}.".startswith(f"{name}.") for name in experts)
        model_meshes = [*(["ep"] if in_experts else []), *_MODEL_MESHES]
        # DDP reduces buckets, outside of any module. An all-to-all sums no gradient.
        is_data_parallel = collective.is_fsdp or (
            collective.module is None and collective.operation != "all_to_all"
        )
        order = [*_DATA_MESHES, *model_meshes] if is_data_parallel else [*model_meshes, *_DATA_MESHES]
        named = {name: self._groups[name] for name in (*order, "world") if name in self._groups}
        ranks = set(collective.group)
        return next((name for name, members in named.items() if ranks == set(members)), None) or next(
            f"part of {name}" for name, members in named.items() if ranks <= set(members)
        )

    def _graphs(self, places: ModuleTracker, record: CompileRecord) -> dict[str, Any]:
        """The compiler's graphs of each class of blocks, and those outside of blocks."""
        kinds: dict[str, list[str]] = {}
        for block in self.blocks if self._to_compile("model") else ():
            kinds.setdefault(self._class(block), []).append(block)
        tables = []
        for kind, names in kinds.items():
            entries = [record.of(name) for name in names]
            breaks: Counter[str] = sum((entry.breaks for entry in entries), Counter())
            tables.append(
                {
                    "class": kind,
                    "blocks": len(names),
                    "ran_compiled": sum(places.calls[name] > 0 for name in names),
                    "graphs": sum(entry.graphs for entry in entries),
                    "graph_breaks": breaks.total(),
                    "break_reasons": dict(breaks),
                    "recompilations": sum(entry.recompilations for entry in entries),
                    "left_eager": sorted({why for entry in entries for why in entry.failures}),
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
    counted = list(collectives)
    return {
        "collectives": len(counted),
        "bytes": sum(c.received or 0 for c in counted),
        "fused": sum(c.fused for c in counted),
    }


def _count_equal(collectives: Iterable[tuple[Collective, str]]) -> list[dict[str, Any]]:
    """Return a table with one row for equal collectives, in order of first occurrence."""
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for c, group in collectives:
        properties = {"phase": c.phase, "operation": c.operation, "group": group, "fused": c.fused}
        row = rows.setdefault(tuple(properties.values()), properties | {"count": 0, "bytes": 0})
        row["count"] += 1
        row["bytes"] += c.received or 0
    return list(rows.values())


def _plan(applied: AppliedPlan | None) -> dict[str, Any]:
    """The fields of tensor, context and expert parallelism; None if the degree is 1."""
    fields: dict[str, Any] = dict.fromkeys(("tensor_parallel", "context_parallel", "expert_parallel"))
    if applied is None:
        return fields
    options = applied.plan.options
    plan = {
        "plan": type(applied.plan).__name__,
        "origin": applied.plan.origin,
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
    adapters = record.adapters
    if adapters is None:
        return None
    return {
        **{name: getattr(adapters.options, name) for name in ("rank", "alpha", "dropout", "quantize_base")},
        "modules": list(adapters.modules),
        "left_out": dict(adapters.left_out),
        "modules_to_save": list(adapters.saved),
        "unfused": list(adapters.unfused),
        "trained": adapters.trained,
        "frozen": adapters.frozen,
    }


def _recomputation(model: nn.Module, blocks: list[str], record: ParallelRecord) -> dict[str, Any] | None:
    recomputed, kept_mixers = set(), 0
    for block in blocks:
        for module in model.get_submodule(block).modules():
            kept_mixers += isinstance(module, Kept)
            is_wrapped = isinstance(module, ActivationWrapper) and not isinstance(module, Kept)
            recomputed |= {block} if is_wrapped or memory_budget(module) is not None else set()
    if not recomputed:
        return None
    return {"policy": record.policy, "blocks": len(recomputed), "of": len(blocks), "kept_mixers": kept_mixers}


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
    common = {"shards": mesh.dp_shard * mesh.cp, "replicas": mesh.dp_replicate}
    if isinstance(config, DDPConfig):
        return {"kind": "DDP", **common, "bucket_cap_mb": config.bucket_cap_mb}
    units = fsdp_units(model)
    if not units:
        return {"kind": config.title, **common}
    policy = mixed_precision(units[0][1])
    return {
        "kind": "FSDP2",
        **common,
        "fsdp_modules": len(units),
        "fsdp_module_names": [name for name, _ in units],
        "param_dtype": _dtype(policy.param_dtype),
        "reduce_dtype": _dtype(policy.reduce_dtype or policy.param_dtype),
        "cpu_offload": getattr(config, "enable_cpu_offload", False),
    }


def _dtype(dtype: torch.dtype | None) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")
