"""`rehearse`: two steps of a job on fake tensors, on one rank of a process group that does not exist.

The job's own functions run: the model is built on meta, split and parallelised, and `StepComputation` computes the steps, so
what is recorded is what a rank allocates. Nothing is computed, and no memory is used. The first step creates the optimizer's
states and the buffers that later steps reuse.
"""

import gc
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import nn
from transformers import PretrainedConfig, masking_utils

from titanplans.config import ConfigError, JobConfig
from titanplans.errors import ParallelError
from titanplans.foresight import compiled
from titanplans.foresight.pipeline import Crossing
from titanplans.foresight.repeat import RepeatedStage, repeating_chunks
from titanplans.kernels import without_launches
from titanplans.observe.storages import Segment, StorageRecord, record_storages
from titanplans.observe.work import work_of_kernel
from titanplans.parallel.mesh.mesh import Mesh
from titanplans.split.decoder import AbsentModule, find_decoder
from titanplans.split.stages.schedules import Action
from titanplans.text import class_name, show
from titanplans.torch_private.autograd import in_backward
from titanplans.torch_private.dispatch import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from titanplans.torch_private.distributed import fake_store
from titanplans.torch_private.dtensor import clear_sharding_cache
from titanplans.torch_private.modules import compiled_call, plain_call, set_compiled_call
from titanplans.torch_private.swapped import swapped
from titanplans.training.job import resolve
from titanplans.training.launch.processes import degrees_of
from titanplans.training.trainer.computation import StepComputation
from titanplans.training.trainer.model import build_on_meta, parallelize_model
from titanplans.training.trainer.optimizer import Optimizers

STEPS = 2
BATCHES = 3
"""Rehearsed batches of a step: the first and the last differ from those in between, of which one is enough."""
WEIGHTS, BUFFERS, GRADIENTS, OPTIMIZER = "weights", "buffers", "gradients", "optimizer states"


@dataclass
class Rehearsal:
    """What a rehearsal has recorded."""

    record: StorageRecord
    blocks: tuple[str, ...]
    """The names of the blocks."""
    parameters: list[list[str]]
    """The names of the parameters of each group of each optimizer, in the group's order."""

    def block_of(self, name: str | None) -> int | None:
        """Return the index of the block that has the module or parameter `name`; None if no block has it."""
        match = None if name is None else self._prefix.match(name)
        return None if match is None else self.blocks.index(match[0])

    @cached_property
    def _prefix(self) -> re.Pattern[str]:
        names = sorted(self.blocks, key=len, reverse=True)
        return re.compile(rf"(?:{'|'.join(map(re.escape, names))})(?=\.|$)")


class Observer(Protocol):
    """Looks at the model of a rehearsal, in the process group that exists only during the rehearsal."""

    def begin(self, computation: StepComputation) -> None:
        """Look at the parallelised model on meta, before the steps. It may get hooks."""

    def end(self, computation: StepComputation, rehearsal: Rehearsal) -> None:
        """Look at the model on fake tensors and at the record, after the steps."""


def rehearse(
    job: JobConfig,
    config: PretrainedConfig,
    world_size: int,
    rank: int = 0,
    removed: Collection[int] = (),
    crossing: Crossing | None = None,
    observer: Observer | None = None,
    *,
    repeats: bool = True,
    is_quick: bool = False,
) -> Rehearsal:
    """Run two steps of `job` on fake tensors, without async tensor parallelism.

    Args:
        job: a checked job that `refuse_options` does not refuse.
        config: the config of its model.
        world_size: the number of ranks.
        rank: the rank that is rehearsed.
        removed: the indices of blocks that are left out.
        crossing: with a pipeline, one object for the rehearsals of all its ranks; rank 0 is rehearsed first, and fills it.
        observer: looks at the model before and after the steps.
        repeats: let chunks of the loss and micro batches stand for others.
        is_quick: run no batch in the first step. It then only creates the optimizer's states, and what the allocator
            reserves is not exact, because it depends on what the first step leaves free.

    Raises:
        PartsDiffer: a micro batch allocates other tensors than the micro batch that stands for it.
        ParallelError: the step reads values of tensors.
        NotTraced: the job is compiled, and can only be rehearsed without compile.
        UserError: as `parallelize`.
    """
    job = job.model_copy(
        update={
            "compile": compiled.rehearsed_options(job.compile),
            "parallelism": job.parallelism.replace(
                enable_async_tensor_parallel=False, enable_fsdp_symm_mem=False
            ),
        }
    )
    with _fake_group(world_size, rank):
        computation = _Computation(
            job, config, Mesh(degrees_of(job), "cpu"), torch.device("cpu"), removed, crossing, repeats=repeats
        )
        if observer is not None:
            observer.begin(computation)
        with (
            _without_garbage_collection(),
            # transformers reads the positions to find documents that are packed into a sequence. It can't read those of fake
            # tensors, and would make a mask of size seq_len x seq_len, in case there are some.
            swapped(masking_utils, "find_packed_sequence_indices", lambda position_ids: None),
            FakeTensorMode(allow_non_fake_inputs=True),
            _as_parallel_error(computation),
            computation.recorded() as record,
            compiled.rehearse_compiled(record) if job.compile.enable else nullcontext(),
            repeating_chunks(record) if repeats else nullcontext(),
            without_launches.reported(
                lambda kernel, tensors: record.operate(work_of_kernel(kernel, tensors))
            ),
        ):
            computation.run(record, is_quick=is_quick)
            parameters = [
                list(group["param_names"])
                for optimizer in computation.optimizers
                for group in optimizer.param_groups
            ]
        rehearsal = Rehearsal(record, computation.blocks, parameters)
        if observer is not None:
            observer.end(computation, rehearsal)
    return rehearsal


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Collect no cycles in the body: a job collects them between steps (training.gc_freq), never within a step."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def refuse_options(job: JobConfig) -> None:
    """Refuse options whose memory a rehearsal does not show.

    Raises:
        ConfigError: names the option.
    """
    refused = {"parallelism.data_parallel_strategy": "ddp", "training.enable_cpu_offload": True}
    for option, value in refused.items():
        if attrgetter(option)(job) == value:
            raise ConfigError(
                f"{option} = {show(value)} can't be estimated yet: only FSDP2 on the GPU can; leave it out"
            )


@contextmanager
def _as_parallel_error(computation: StepComputation) -> Iterator[None]:
    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise ParallelError(
            f"{class_name(computation.lms[0])} can't be estimated: its step reads values of tensors ({error.func}), and the "
            "step of an estimate has none"
        ) from error


@contextmanager
def _fake_group(world_size: int, rank: int) -> Iterator[None]:
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=fake_store())
    try:
        # DTensor caches shardings by mesh, and an earlier mesh of the same shape is equal although its group is gone.
        clear_sharding_cache()
        yield
    finally:
        dist.destroy_process_group()
        clear_sharding_cache()


class _Computation(StepComputation):
    """The steps of a job on fake tensors."""

    record: StorageRecord

    def __init__(
        self,
        job: JobConfig,
        config: PretrainedConfig,
        mesh: Mesh,
        device: torch.device,
        removed: Collection[int],
        crossing: Crossing | None,
        *,
        repeats: bool,
    ):
        super().__init__(job, config, mesh, device)
        # Documents are joined: kernels that keep them apart read their lengths, which fake tensors lack.
        model = build_on_meta(job, config, document_keyword=None)
        remove_blocks(model.lm, removed)
        self.blocks = find_decoder(model.lm).names
        attributes = {
            "crossing": crossing,
            "timing": self._mark,
            "record": lambda stage: self.record,
            # If parameters are gathered for each forward, a forward frees what the previous forward has gathered.
            "repeats": repeats and job.parallelism.fsdp_reshard_after_forward != "always",
        }
        stage_class = type("Stage", (RepeatedStage,), attributes)
        self.model_parts, self.pipeline = parallelize_model(
            model, job, self.strategy, mesh, device, self.loss, stage_class
        )

    @contextmanager
    def _mark(self, action: Action) -> Iterator[None]:
        """Note which micro batch runs, in the context of a computation of a pipeline stage."""
        segment = self.record.segment
        self.record.segment = Segment(segment.step, action.kind, None, action.microbatch, action)
        yield
        self.record.segment = Segment(segment.step, "schedule", None, action.microbatch)

    @contextmanager
    def recorded(self) -> Iterator[StorageRecord]:
        """Record the body."""
        with record_storages(nn.ModuleList(self.lms) if len(self.lms) > 1 else self.lms[0]) as self.record:
            yield self.record

    def run(self, record: StorageRecord, *, is_quick: bool) -> None:
        """Create weights and optimizers, and run two steps; `is_quick`: the first one without a batch."""
        record.segment = Segment(0, "begin")
        for part in self.model_parts:
            part.lm.to_empty(device="cpu")
            part.lm.train()
            splits_backward = self.pipeline is not None and self.pipeline.splits_backward
            part.set_loss(self.loss, self.mesh.get_optional_mesh("batch"), splits_backward=splits_backward)
            record.label(part.lm.named_parameters(), WEIGHTS)
            record.label(part.lm.named_buffers(), BUFFERS)
        self.optimizers = Optimizers(self.job, self.lms)
        for part in self.model_parts:
            _mark_blocks(part.lm, self.blocks, record)
        for step in range(1, STEPS + 1):
            self._step(step, record, has_batches=step == STEPS or not is_quick)

    def _step(self, step: int, record: StorageRecord, *, has_batches: bool) -> None:
        job = self.job
        record.segment = Segment(step, "begin")
        self.optimizers.zero_grad()
        batch = self.mesh.get_optional_mesh("batch")
        data_parallel = 1 if batch is None else batch.size()
        sequences = job.training.local_batch_size
        batches = resolve.global_batch_size(job, data_parallel) // (sequences * data_parallel)
        # The first step only creates what later steps reuse.
        batches = min(batches, BATCHES) if step == STEPS else int(has_batches)
        valid_tokens = torch.ones((), dtype=torch.int64)
        for index in range(batches):
            record.segment = Segment(step, "begin", None, index)
            tokens, positions, labels = (
                torch.zeros(sequences, job.training.seq_len, dtype=torch.int64) for _ in range(3)
            )
            inputs = {"input": tokens, "positions": positions}
            with self.accumulating(last=index == batches - 1):
                self.forward_backward_step((inputs, labels), valid_tokens)
            del tokens, positions, labels, inputs
        if not has_batches:
            for parameter in (p for lm in self.lms for p in lm.parameters() if p.requires_grad):
                parameter.grad = torch.zeros_like(parameter)
        record.segment = Segment(step, "clip")
        for part in self.model_parts:
            gradients = ((name, p.grad) for name, p in part.lm.named_parameters())
            record.label(((name, grad) for name, grad in gradients if grad is not None), GRADIENTS)
        self.clip(step)
        record.segment = Segment(step, "update")
        self.optimizers.step()
        for optimizer in self.optimizers:
            record.label(_states(optimizer), OPTIMIZER)
        record.segment = Segment(step, "end")


def remove_blocks(model: nn.Module, removed: Collection[int]) -> None:
    """Remove blocks from `model`, unsplit and on meta."""
    if removed:
        path = find_decoder(model).names[0].rpartition(".")[0]
        parent, _, name = path.rpartition(".")
        blocks = cast(nn.ModuleList, model.get_submodule(path))
        kept = [block for index, block in enumerate(blocks) if index not in removed]
        model.get_submodule(parent)._modules[name] = nn.ModuleList(kept)


def _states(optimizer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for group in optimizer.param_groups:
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            for value in optimizer.state[parameter].values():
                if isinstance(value, torch.Tensor):
                    yield name, value


def _mark_blocks(model: nn.Module, blocks: tuple[str, ...], record: StorageRecord) -> None:
    """Set `record.segment` when the forward or the backward of a block begins."""
    present = [
        (index, block)
        for index, name in enumerate(blocks)
        if not isinstance(block := model.get_submodule(name), AbsentModule)
    ]

    def marked(index: int, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if in_backward():
                return call(*args, **kwargs)
            record.segment = replace(record.segment, kind="forward", block=index)
            output = call(*args, **kwargs)
            hidden = output
            while isinstance(hidden, tuple):
                hidden = hidden[0]

            def begin_backward(gradient: torch.Tensor) -> None:
                record.segment = replace(record.segment, kind="backward", block=index)

            if hidden.requires_grad:
                hidden.register_hook(begin_backward)
            if index == present[-1][0]:
                record.segment = replace(record.segment, kind="loss", block=None)
            return output

        return run

    for index, block in present:
        # Hooks would be traced into a compiled block.
        set_compiled_call(block, marked(index, compiled_call(block) or plain_call(block)))
