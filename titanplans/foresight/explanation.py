"""`explain`: how a job's model is split, module by module, what its ranks send, and what the backward recomputes."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from transformers import PretrainedConfig

from titanplans.config import JobConfig
from titanplans.foresight.depth import Depth
from titanplans.foresight.forecast import Forecast, forecast, shortened
from titanplans.foresight.hardware import Gpu
from titanplans.foresight.rehearsal import STEPS, Rehearsal, rehearse
from titanplans.foresight.time import scale_of_batch
from titanplans.observe.operators import Phase
from titanplans.observe.storages import Operation
from titanplans.observe.tracker import plain
from titanplans.parallel.record import record_of
from titanplans.parallel.report import STEP_KEYS, ParallelismReport
from titanplans.plan.resolve import ResolvedPlan
from titanplans.split.decoder import find_decoder, join, within
from titanplans.split.layout import rows_used, shard_size
from titanplans.text import class_name
from titanplans.torch_private.autograd import in_backward
from titanplans.torch_private.dtensor import StridedShard, local_tensor
from titanplans.torch_private.modules import ActivationWrapper
from titanplans.training.job import resolve
from titanplans.training.trainer.computation import StepComputation

Shape = tuple[int, ...]
_MODEL_PARALLEL = frozenset(("tp", "ep"))
"""Dimensions of the mesh whose shards a module's code computes with. FSDP gathers the shards of the other dimensions."""
_MEASURED = frozenset(("measured_after_step", "reasons", *STEP_KEYS))
"""Keys of the parallelism report that a measured step sets."""
_TRITON = "triton::"


@dataclass(frozen=True)
class ExplainedParameter:
    """How a parameter is split."""

    name: str
    style: str
    """The name of the class of its own style; "" if its module's style lays it out."""
    shape: Shape
    """The shape of the full tensor."""
    local: Shape
    """The shape that the module's code computes with on a rank, after FSDP has gathered the parameter."""
    placements: tuple[tuple[str, str], ...]
    """The placement by dimension of the mesh, such as ("tp", "Shard(0)")."""
    sums_gradient: bool
    """Each rank computes a summand of the gradient, although it has the full parameter."""
    bytes: int
    """What a rank stores, between steps."""


@dataclass(frozen=True)
class ExplainedModule:
    """How a module is split, and the shape of its output."""

    name: str
    """Its name within its block, or in the model."""
    kind: str
    """The name of its class."""
    style: str
    """The name of the class of its style; "" if the plan has no key for the module."""
    parameters: tuple[ExplainedParameter, ...]
    output: Shape | None
    """The shape of its output on a rank; None: it returns no tensor, or is not called."""
    unsplit: Shape | None
    """The shape of its output in the unsplit model, for the same number of sequences."""


class Transfer(NamedTuple):
    """Collectives of the same kind that a module issues in a step."""

    module: str
    """Its name within its block, or in the model. "": the block itself, or code outside of the model, such as clipping."""
    phase: Phase
    operation: str
    mesh: str
    """The dimension of the mesh."""
    is_fsdp: bool
    count: float
    bytes: float
    """Bytes that a rank receives."""


@dataclass(frozen=True)
class Stretch:
    """Consecutive operators of one module in the forward of a block."""

    module: str
    operators: int
    recomputed: int
    """How many of the operators run again in the backward."""
    flops: int
    bytes: int
    """Bytes that the operators read and write."""
    kernels: tuple[str, ...]
    """The kernels of Triton among them."""
    transfer: Transfer | None
    """The collective, if it is the only operator."""


@dataclass
class ExplainedBlock:
    """How blocks that are alike are split, what they send, and what they compute."""

    names: list[str]
    kind: str
    """The name of their class."""
    modules: tuple[ExplainedModule, ...]
    forward: tuple[Stretch, ...]
    """What one of them computes for one batch or micro batch, in order."""
    backward: tuple[Transfer, ...]
    """The collectives of its backward for one batch, in order, without those of the recomputation."""
    transfers: list[Transfer]
    """What all of them send in a step."""


@dataclass
class ExplainedStage:
    """How the part of the model on one rank is split; without a pipeline the complete model."""

    stage: int
    report: dict[str, Any]
    """The parallelism report (docs/observe.md), without its measurements."""
    blocks: list[ExplainedBlock]
    others: list[ExplainedModule]
    """The modules outside of blocks."""
    transfers: list[Transfer]
    """What the modules outside of blocks send in a step."""


@dataclass
class Explanation:
    """How a job is split, and its forecast."""

    stages: list[ExplainedStage]
    """The rehearsed pipeline stages: the first, a middle and the last one."""
    forecast: Forecast


def explain(job: JobConfig, world_size: int, gpu: Gpu) -> Explanation:
    """Rehearse `job` as `forecast` does, and once more as the unsplit model.

    Raises:
        UserError: as `forecast`.
    """
    config, observers = resolve.hf_config(job), dict[int, _StageObserver]()
    outputs = _unsplit_outputs(job, config)

    def observe(stage: int, depth: Depth) -> _StageObserver:
        observers[stage] = _StageObserver(job, world_size, stage, depth)
        return observers[stage]

    # While a compiled block runs, it is not known which of its modules computes.
    found = forecast(_without_compile(job), world_size, gpu, observe)
    if job.compile.enable:
        found = forecast(job, world_size, gpu)
    return Explanation([observer.split(outputs) for observer in observers.values()], found)


def _without_compile(job: JobConfig) -> JobConfig:
    return job.model_copy(update={"compile": job.compile.replace(enable=False)})


def _unsplit_outputs(job: JobConfig, config: PretrainedConfig) -> dict[str, Shape]:
    """Return the shape of the output of each module of the unsplit model, by its name in the job's model."""
    degrees = {
        "data_parallel_replicate_degree": 1,
        "data_parallel_shard_degree": 1,
        "tensor_parallel_degree": 1,
        "context_parallel_degree": 1,
        "expert_parallel_degree": 1,
        "pipeline_parallel_degree": 1,
        "pipeline_parallel_split_points": (),
        "pipeline_parallel_layers_per_stage": None,
        "enable_async_tensor_parallel": False,
    }
    p, sequences = job.parallelism, job.training.local_batch_size
    if p.pipeline_parallel_degree > 1:
        sequences = p.pipeline_parallel_microbatch_size
    training = job.training.replace(local_batch_size=sequences, global_batch_size=-1)
    unsplit = _without_compile(job).model_copy(
        update={"parallelism": p.replace(**degrees), "training": training}
    )
    unsplit, depth = shortened(unsplit, config)
    outputs = _Outputs()
    rehearse(unsplit, config, 1, removed=depth.removed, observer=outputs)
    names = outputs.blocks
    shapes = outputs.shapes.items()
    return {each: shape for name, shape in shapes for each in _names_in_job(name, names, depth)}


def _names_in_job(name: str, blocks: Sequence[str], depth: Depth) -> Iterator[str]:
    """Yield the names in the job's model of a module of the rehearsed model, whose blocks are `blocks`."""
    index = next((i for i, block in enumerate(blocks) if _is_in(name, block)), None)
    if index is None or not depth.removed:
        yield name
        return
    parent = blocks[index].rpartition(".")[0]
    for place in depth.places[index]:
        yield join(f"{parent}.{place}", name.removeprefix(blocks[index]).removeprefix("."))


class _Outputs:
    """Observes the shapes of the modules' outputs.

    Attributes:
        shapes: the shape of each module's output by the module's name, in the order in which the modules end.
        blocks: the names of the blocks.
    """

    def __init__(self) -> None:
        self.shapes: dict[str, Shape] = {}
        self.blocks: tuple[str, ...] = ()

    def begin(self, computation: StepComputation) -> None:
        for lm in computation.lms:
            for name, module in lm.named_modules():
                module.register_forward_hook(self._hook(plain(name)))

    def end(self, computation: StepComputation, rehearsal: Rehearsal) -> None:
        self.blocks = rehearsal.blocks

    def _hook(self, name: str) -> Callable[..., None]:
        def note(module: nn.Module, args: Any, output: Any) -> None:
            while isinstance(output, tuple) and output:
                output = output[0]
            if isinstance(output, torch.Tensor) and not in_backward():
                self.shapes[name] = tuple(output.shape)

        return note


class _StageObserver(_Outputs):
    """Observes how the modules of a rank are split, and what they send.

    Args:
        job: the job.
        world_size: the number of ranks.
        stage: index of the rank's pipeline stage.
        depth: which blocks are rehearsed.
    """

    def __init__(self, job: JobConfig, world_size: int, stage: int, depth: Depth):
        super().__init__()
        data_parallel = resolve.data_parallel_degree(job, world_size)
        sequences = resolve.global_batch_size(job, data_parallel) // data_parallel
        self.batches = sequences // job.training.local_batch_size
        self.stage, self.depth = stage, depth

    def end(self, computation: StepComputation, rehearsal: Rehearsal) -> None:
        super().end(computation, rehearsal)
        lms = computation.lms
        report = ParallelismReport(lms[0], computation.mesh, computation.strategy)
        self.report = {key: value for key, value in report.values.items() if key not in _MEASURED}
        self.modules = [module for lm in lms for module in _modules_of(lm, self.shapes)]
        self.operations = [
            _Named(_without_stage(each.module or "", len(lms)), each, _transfer(each, report))
            for each in rehearsal.record.operations
            if each.segment.step == STEPS
        ]

    def split(self, unsplit: dict[str, Shape]) -> ExplainedStage:
        """Return how the rank is split; `unsplit` has the shapes of the outputs of the unsplit model."""
        alike: dict[Any, ExplainedBlock] = {}
        for index, name in enumerate(self.blocks):
            modules = self._modules_in(name, unsplit)
            if not modules:
                continue  # another stage has it
            forward, backward = self._computation(index, name)
            block = ExplainedBlock([], modules[0].kind, modules, forward, backward, [])
            block = alike.setdefault((modules, forward, backward), block)
            places = list(_names_in_job(name, self.blocks, self.depth))
            block.names += places
            block.transfers += self._sent(name, len(places))
        for block in alike.values():
            block.transfers = _added(block.transfers)
        outside = [module for module in self.modules if not self._is_in_block(module.name)]
        others = [replace(module, unsplit=unsplit.get(module.name)) for module in outside]
        transfers = [each for each in self._sent("", 1) if not self._is_in_block(each.module)]
        return ExplainedStage(self.stage, self.report, list(alike.values()), others, _added(transfers))

    def _sent(self, module: str, copies: int) -> Iterator[Transfer]:
        """Yield what `module` and the modules in it send in a step, if there are `copies` of it."""
        for name, operation, transfer in self.operations:
            if transfer is not None and _is_in(name, module):
                count = copies * scale_of_batch(operation.segment, self.batches)
                yield transfer._replace(
                    module=_name_in(name, module), count=count, bytes=transfer.bytes * count
                )

    def _is_in_block(self, name: str) -> bool:
        return any(_is_in(name, block) for block in self.blocks)

    def _modules_in(self, block: str, unsplit: dict[str, Shape]) -> tuple[ExplainedModule, ...]:
        in_job = next(_names_in_job(block, self.blocks, self.depth))
        return tuple(
            replace(module, name=name, unsplit=unsplit.get(join(in_job, name)))
            for module in self.modules
            if _is_in(module.name, block)
            for name in (_name_in(module.name, block),)
        )

    def _computation(self, index: int, block: str) -> tuple[tuple[Stretch, ...], tuple[Transfer, ...]]:
        """Return the operators of the forward of a block, for one batch, and the collectives of its backward."""
        of_block = [
            each._replace(name=_name_in(each.name, block))
            for each in self.operations
            if each.operation.segment.block == index
            and each.operation.segment.batch == 0
            and not each.operation.is_fsdp
            and _is_in(each.name, block)
        ]
        again = Counter(
            (name, operation.work.operator)
            for name, operation, _ in of_block
            if operation.phase == "recomputed"
        )
        forward = [each for each in of_block if each.operation.segment.kind == "forward"]
        stretches = []
        for (module, _), run in groupby(
            forward, lambda each: (each.name, each.transfer and id(each.operation))
        ):
            named = list(run)
            works = [operation.work for _, operation, _ in named]
            recomputed = 0
            for work in works:
                if again[module, work.operator] > 0:
                    again[module, work.operator] -= 1
                    recomputed += 1
            kernels = tuple(work.operator.removeprefix(_TRITON) for work in works if work.is_triton)
            flops, size = sum(work.flops for work in works), sum(work.bytes for work in works)
            stretches.append(Stretch(module, len(works), recomputed, flops, size, kernels, named[0].transfer))
        backward = tuple(
            transfer._replace(module=name)
            for name, operation, transfer in of_block
            if transfer is not None and operation.phase == "backward"
        )
        return tuple(stretches), backward


class _Named(NamedTuple):
    name: str
    """The name of the module that issues it."""
    operation: Operation
    transfer: Transfer | None
    """The operation, if it is a collective."""


def _transfer(operation: Operation, report: ParallelismReport) -> Transfer | None:
    collective = operation.work.collective
    if collective is None:
        return None
    collective = collective._replace(
        module=operation.module, phase=operation.phase, is_fsdp=operation.is_fsdp
    )
    mesh, received = report.mesh_of(collective), collective.received or 0
    return Transfer("", operation.phase, collective.operation, mesh, operation.is_fsdp, 1, received)


def _without_stage(name: str, stages: int) -> str:
    """Return the name of a module in its stage; with several stages on a rank, the recorded names begin with the stage's."""
    return name.partition(".")[2] if stages > 1 else name


def _modules_of(lm: nn.Module, shapes: dict[str, Shape]) -> Iterator[ExplainedModule]:
    """Yield the blocks, and the modules that have a style or parameters of their own, in the order of the model."""
    record = record_of(lm)
    plan = None if record.plan is None else record.plan.resolved
    entries = {} if plan is None else plan.by_key
    blocks = find_decoder(lm).names
    for wrapped, module in lm.named_modules():
        name, direct = plain(wrapped), module._parameters.items()
        parameters = tuple(
            _parameter_of(key, parameter, name, plan) for key, parameter in direct if parameter is not None
        )
        if isinstance(module, ActivationWrapper) or not (parameters or name in entries or name in blocks):
            continue
        style = class_name(entries[name].style) if name in entries else ""
        kind = class_name(module).removeprefix("FSDP")
        yield ExplainedModule(name, kind, style, parameters, shapes.get(name), None)


def _parameter_of(
    name: str, parameter: nn.Parameter, module: str, plan: ResolvedPlan | None
) -> ExplainedParameter:
    by_key = {} if plan is None else plan.by_key
    own = by_key.get(join(module, name))
    entry = by_key.get(module) if own is None else own
    shape, local, placements = tuple(parameter.shape), parameter, dict[str, str]()
    sharded = list(shape)
    if isinstance(parameter, DTensor):
        local = local_tensor(parameter)
        mesh = parameter.device_mesh
        named = zip(mesh.mesh_dim_names or (), mesh.shape, parameter.placements, strict=True)
        for dim, ranks, placement in named:
            if ranks == 1:
                continue
            # FSDP2 labels a shard of a shard as StridedShard.
            is_sharded = isinstance(placement, Shard | StridedShard)
            placements[dim] = f"Shard({placement.dim})" if is_sharded else type(placement).__name__
            if is_sharded and dim in _MODEL_PARALLEL:
                sharded[placement.dim] = shard_size(sharded[placement.dim], ranks)
    layout = None
    if plan is not None and entry is not None and not entry.style.splits_by_experts:
        degrees, is_in_mixer = plan.source.options.degrees, plan.token_region_of(entry) is not None
        layout = (entry.head_layouts if is_in_mixer else entry.layouts).get(name)
        rows = None
        if layout is not None:
            rows = rows_used(layout, shape, degrees.tp_cp if is_in_mixer else degrees.tp)
        if rows is not None:
            sharded = list(shape)
            sharded[rows.dim] = sum(run.row_count(0) for run in rows.runs)
    sums = layout is not None and layout.gradient.is_partial()
    style = class_name(own.style) if own is not None else ""
    size = local.numel() * local.element_size()
    return ExplainedParameter(name, style, shape, tuple(sharded), tuple(placements.items()), sums, size)


def _added(transfers: Iterable[Transfer]) -> list[Transfer]:
    """Return the transfers, with those added up that differ only in their count and bytes."""
    added: dict[tuple[Any, ...], Transfer] = {}
    for each in transfers:
        before = added.get(each[:5])
        if before is not None:
            each = each._replace(count=before.count + each.count, bytes=before.bytes + each.bytes)
        added[each[:5]] = each
    return list(added.values())


def _is_in(name: str, module: str) -> bool:
    return name == module or within(name, module)


def _name_in(name: str, module: str) -> str:
    """Return the name in `module` of a module within it; "" is `module` itself."""
    return name.removeprefix(module).removeprefix(".")
