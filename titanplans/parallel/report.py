"""The static part of a model's parallelism report: read off the model and its strategy, once it is parallel.

The report itself, and its part that a step measures, are in `titanplans.observe.report`.
"""

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from titanplans.apply.apply import AppliedPlan
from titanplans.config import DDPConfig, Strategy
from titanplans.observe.compilation import is_compiled
from titanplans.observe.places import fsdp_units
from titanplans.observe.report import ParallelismReport
from titanplans.parallel.activation_checkpoint import Kept, memory_budget
from titanplans.parallel.record import ParallelRecord, record_of
from titanplans.plan.decoder import find_decoder
from titanplans.plan.styles.experts import ByExpert
from titanplans.plan.token_regions import token_regions
from titanplans.precision.float8.conversion import float8_report
from titanplans.torch_private.modules import ActivationWrapper

_DEGREES = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")


def parallelism_report(model: nn.Module, mesh: Any, config: Strategy) -> ParallelismReport:
    """Return the report on `model`, which is parallel, and under DDP has its values.

    Args:
        model: parallelised.
        mesh: a `Mesh`, or torchtitan's ParallelDims.
        config: the strategy by which it was.

    Raises:
        ParallelError: a block that was to be compiled is not.
    """
    record = record_of(model)
    decoder = record.plan.decoder if record.plan is not None else find_decoder(model)
    blocks = [*decoder.names, *(name for names in decoder.towers for name in names)]
    return ParallelismReport(
        model,
        mesh,
        decoder,
        {
            "strategy": lambda: config.title,
            "world_size": dist.get_world_size,
            "degrees": lambda: {name: getattr(mesh, name) for name in _DEGREES},
            "steps_taken": lambda: list(record.steps),
            "tensor_parallel": lambda: _tensor_parallel(record),
            "context_parallel": lambda: _context_parallel(record),
            "expert_parallel": lambda: _expert_parallel(record),
            "float8": lambda: float8_report(
                model, record.float8, record.plan.crossings if record.plan else {}
            ),
            "adapters": lambda: _adapters(record),
            "recomputation": lambda: _recomputation(model, blocks, record),
            "compile": lambda: _compile(model, blocks, config),
            "autocast": lambda: getattr(config, "autocast_dtype", None),
            "data_parallel": lambda: _data_parallel(model, mesh, config),
        },
    )


def _tensor_parallel(record: ParallelRecord) -> dict[str, Any] | None:
    if record.plan is None or record.plan.plan.options.degree == 1:
        return None
    options = record.plan.plan.options
    return {
        **_plan(record.plan),
        "sequence_parallel": options.sequence_parallel,
        "loss_parallel": options.loss_parallel,
    }


def _context_parallel(record: ParallelRecord) -> dict[str, Any] | None:
    if record.plan is None or record.plan.plan.options.degrees.cp == 1:
        return None
    return {**_plan(record.plan), "regions": sorted(token_regions(record.plan.resolved))}


def _expert_parallel(record: ParallelRecord) -> dict[str, Any] | None:
    if record.plan is None or record.plan.plan.options.degrees.ep == 1:
        return None
    experts = [entry.key for entry in record.plan.resolved.entries if isinstance(entry.style, ByExpert)]
    return {**_plan(record.plan), "experts": experts}


def _plan(applied: AppliedPlan) -> dict[str, Any]:
    return {
        "plan": type(applied.plan).__name__,
        "styles": dict(Counter(type(style).__name__ for style in applied.styles.values())),
    }


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
    recomputed, kept = Counter(), 0
    for block in blocks:
        for module in model.get_submodule(block).modules():
            kept += isinstance(module, Kept)
            wrapped = isinstance(module, ActivationWrapper) and not isinstance(module, Kept)
            recomputed[block] += wrapped or memory_budget(module) is not None
    if not recomputed.total():
        return None
    return {
        "policy": record.policy,
        "blocks": len(+recomputed),
        "of": len(blocks),
        "kept_mixers": kept,
    }


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
