"""What took effect: of the options, what was done to the model; and of one step, what it communicated and compiled.

    effect = Effect(model, mesh, config)        # once the model is parallel, and DDP has its values
    with effect.measuring(step=1):
        ...                                     # a whole training step
    effect.report                               # plain dicts, lists, numbers: docs/what-took-effect.md

What is in the report was read off the model, counted as it happened, or given by torch; what can't be known is None, with
the reason beside it. When it is written and logged is the training loop's matter, in which words `effect_words`'.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper

from titanplans.config import DDPConfig, FSDP2Config, Strategy
from titanplans.errors import ParallelError
from titanplans.observe.collective_record import Record, meshes, record_collectives
from titanplans.observe.compile_record import (
    Compilation,
    check_beside_blocks,
    check_compiled,
    record_compilation,
)
from titanplans.observe.effect_tables import communication, graphs
from titanplans.observe.step_places import fsdp_units
from titanplans.parallel.activation_checkpoint import memory_budget
from titanplans.parallel.activation_checkpoint.keep_mixer import Kept
from titanplans.parallel.blocks import block_lists
from titanplans.parallel.float8 import float8_report
from titanplans.parallel.steps import steps_taken
from titanplans.tensor_parallel.custom import resolve_plan
from titanplans.tensor_parallel.plan import TPOptions

SCHEMA = 1
"""Of the report: counted up when a key changes its meaning or goes."""

_DEGREES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


class Effect:
    """The report on one model; `report` is filled in by `measuring`.

    Args:
        model: parallelised.
        mesh: a `Mesh`, or torchtitan's ParallelDims.
        config: the strategy by which it was.

    Raises:
        ParallelError: a block that was to be compiled is not.
    """

    def __init__(self, model: nn.Module, mesh: Any, config: Strategy):
        self.model, self.mesh, self.config = model, mesh, config
        self.blocks = [name for names in block_lists(model, "all") for name in names]
        self.report: dict[str, Any] = {
            "schema": SCHEMA,
            "measured_after_step": None,
            "torch": torch.__version__,
            "strategy": config.title,
            "world_size": dist.get_world_size(),
            "degrees": {name: getattr(mesh, name) for name in _DEGREES},
            "meshes": {
                name: {"ranks": found.size(), "backend": dist.get_backend(found.get_group())}
                for name, found in meshes(mesh).items()
            },
            "steps_taken": [step["step"] for step in steps_taken(model)],
            "tensor_parallel": self._tensor_parallel(),
            "float8": float8_report(model),
            "recomputation": self._recomputation(),
            "compile": self._compile(),
            "autocast": getattr(config, "autocast_dtype", None),
            "data_parallel": self._data_parallel(),
            "step": {"collectives": None, "bytes": None, "reason": "no step has ended yet"},
            "blocks": None,
            "beside_blocks": None,
        }

    @contextmanager
    def measuring(self, step: int) -> Iterator[Record]:
        """Measure the training step that runs inside, and put it into the report; on every rank, or on none.

        The step computes what it would, a little slower; nothing stays in the model.

        Args:
            step: its number, for the report.

        Raises:
            ParallelError: what was to be compiled ran eagerly.
        """
        compiled = self.report["compile"]
        with ExitStack() as stack:
            record = stack.enter_context(record_collectives(self.model, self.mesh))
            compilation = None
            if compiled is not None:
                compilation = stack.enter_context(record_compilation(record.places))
            yield record
        if compiled is not None and compilation is not None:
            if compiled["blocks"]:
                check_compiled(self.model, record.places, compilation)
            check_beside_blocks(compilation, loss=compiled["loss"], optimizer=compiled["optimizer"])
            kinds = graphs(self.model, self.blocks, record.places, compilation) if compiled["blocks"] else []
            beside = compilation.get(None, Compilation()).graphs
            compiled |= {"kinds": kinds, "graphs_beside_blocks": beside, "reason": None}
        self.report |= {"measured_after_step": step} | communication(self.model, self.blocks, record)

    # What was done to the model.

    def _tensor_parallel(self) -> dict[str, Any] | None:
        taken = [step for step in steps_taken(self.model) if step["step"] == "tensor parallelism"]
        if not taken or not isinstance(config := self.config, FSDP2Config):
            return None
        loss_parallel, sequence_parallel = not config.disable_loss_parallel, config.enable_sequence_parallel
        options = TPOptions(self.mesh.tp, loss_parallel, sequence_parallel)
        return {
            "plan": type(resolve_plan(config.plan, self.model, options)).__name__,
            "styles": taken[0]["styles"],
            "sequence_parallel": sequence_parallel,
            "loss_parallel": loss_parallel,
        }

    def _recomputation(self) -> dict[str, Any] | None:
        taken = [step for step in steps_taken(self.model) if step["step"] == "activation checkpointing"]
        wrapped, kept = Counter(), Counter()
        for block in self.blocks:
            for module in self.model.get_submodule(block).modules():
                wrapped[block] += memory_budget(module) is not None
                wrapped[block] += isinstance(module, ActivationWrapper) and not isinstance(module, Kept)
                kept[block] += isinstance(module, Kept)
        recomputed = [block for block, count in wrapped.items() if count]
        if not recomputed:
            return None
        return {
            "policy": taken[0]["policy"] if taken else None,
            "blocks": len(recomputed),
            "of": len(self.blocks),
            "kept_mixers": kept.total(),
        }

    def _compile(self) -> dict[str, Any] | None:
        options = getattr(self.config, "compile", None)
        if options is None or not options.enable:
            return None
        compiled = [block for block in self.blocks if _is_compiled(self.model.get_submodule(block))]
        if options.blocks and (dropped := [block for block in self.blocks if block not in compiled]):
            raise ParallelError(
                f"compile: {dropped[0]} was to be compiled, and is not: replace, copy or wrap a block before it is "
                "compiled, not after; or switch compile off"
            )
        return {
            "blocks": len(compiled),
            "of": len(self.blocks),
            **{name: getattr(options, name) for name in ("backend", "mode", "fullgraph", "dynamic")},
            "loss": "loss" in options.components,
            "optimizer": "optimizer" in options.components,
            "async_tensor_parallel": getattr(self.config, "enable_async_tensor_parallel", False),
            "kinds": None,
            "graphs_beside_blocks": None,
            "reason": "no step has ended yet",
        }

    def _data_parallel(self) -> dict[str, Any]:
        mesh, config = self.mesh, self.config
        common = {"shards": mesh.dp_shard * mesh.cp, "copies": mesh.dp_replicate}
        if isinstance(config, DDPConfig):
            return {"kind": "DDP", **common, "bucket_cap_mb": config.bucket_cap_mb}
        units = fsdp_units(self.model)
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


def _is_compiled(block: nn.Module) -> bool:
    inner = block._checkpoint_wrapped_module if isinstance(block, ActivationWrapper) else None
    return any(module is not None and module._compiled_call_impl is not None for module in (block, inner))


def _dtype(dtype: torch.dtype | None) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")
