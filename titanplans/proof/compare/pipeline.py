"""A model split into pipeline stages; each rank of a proof has all stages. Start at `PipelinedModel`.

Nothing is sent between stages. The blocks of a stage, the tensors that pass between stages, shared parameters and the
order of the schedule are as in a job. As on several ranks, a stage receives detached tensors. The backward of the previous
stage starts with the gradients of these tensors.
"""

import copy
import functools
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from titanplans.apply.apply import AppliedPlan, choose_way, split
from titanplans.apply.check import check
from titanplans.errors import ParallelError, PlanError
from titanplans.plan.custom import PlanSource, resolve_plan
from titanplans.plan.options import TPOptions
from titanplans.plan.resolve import ResolvedPlan
from titanplans.proof.compare.forward import FAILURES, does_not_run, widened
from titanplans.split.decoder import AbsentModule, find_decoder, within
from titanplans.split.meshes import meshes_of
from titanplans.split.stages.compare import check_stages
from titanplans.split.stages.schedules import merge_orders, orders
from titanplans.split.stages.shared import SharedParameters
from titanplans.split.stages.stage import Stage
from titanplans.split.stages.stages import Stages, balance_fault
from titanplans.split.stages.trace import Trace, trace
from titanplans.split.state import border_of_model, make_state
from titanplans.text import counted
from titanplans.torch_private.pipelining import backward_of_inputs, backward_of_weights, copy_views


class PipelinedModel(nn.Module):
    """The stages of a model as one model: same signature, same names of modules and parameters.

    Args:
        stages: the stages in order, each split by the plan.
        shared: the parameters that several stages hold. Maps a parameter's name in the unsplit model to its names in the
            stages, by the stage's index.
        plan: the plan of the unsplit model.
    """

    def __init__(self, stages: Sequence[Stage], shared: Mapping[str, Mapping[int, str]], plan: ResolvedPlan):
        super().__init__()
        self.stages, self._shared_names, self.plan = stages, shared, plan
        if (config := getattr(stages[-1].model, "config", None)) is not None:
            self.config = config
        for at, stage in enumerate(stages):
            self.add_module(str(at), stage.model)
            stage.watch()
        self.shared = SharedParameters(
            [*shared.values()], {at: stage.model for at, stage in enumerate(stages)}
        )
        make_state(self).border = border_of_model(stages[-1].model)

        @functools.wraps(stages[0].model.forward)  # its signature tells which inputs the model takes
        def forward(**inputs: Any) -> Any:
            output: Any = ()
            for stage in stages:
                output = stage.run(output, functools.partial(stage.model, **inputs))
            return output

        self.forward = forward

    def named_modules(self, *args: Any, **kwargs: Any) -> Generator[tuple[str, nn.Module], None, None]:
        """Yield each module once, from the first stage that has it; modules that hold the blocks are left out."""
        seen = set()
        for stage in self.stages:
            for name, module in stage.model.named_modules():
                holds_blocks = any(within(block, name) for block in self.plan.decoder.names)
                if name not in seen and not holds_blocks and not isinstance(module, AbsentModule):
                    seen.add(name)
                    yield name, module

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield each parameter once, from the first stage that has it, with its name in the unsplit model."""
        duplicates = self.shared.duplicates()
        unsplit_names = {
            (index, name): unsplit
            for unsplit, names in self._shared_names.items()
            for index, name in names.items()
        }
        for index, stage in enumerate(self.stages):
            for name, parameter in stage.model.named_parameters():
                if id(parameter) not in duplicates:
                    yield unsplit_names.get((index, name), name), parameter

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Yield the parameters of all stages; a parameter that several stages hold is yielded once for each stage."""
        for stage in self.stages:
            yield from stage.model.parameters()


def split_stages(
    model: nn.Module,
    plan: PlanSource,
    options: TPOptions,
    mesh: DeviceMesh,
    experts: DeviceMesh | None,
    traced: Trace,
) -> tuple[PipelinedModel, list[AppliedPlan]]:
    """Split copies of `model` into its stages, and each stage over `mesh` and `experts`, as in `apply_plan`.

    Returns:
        The stages as one model, and the applied plan of each stage.

    Raises:
        PlanError: the plan's checks refuse it.
    """
    stages = Stages(model, traced, starts_of(len(find_decoder(model).names), options.degrees.pp))
    built, applied = [], []
    for index in range(len(stages)):
        stage_model = copy.deepcopy(model)
        # The plan is checked on the unsplit model, before the stage loses its modules.
        checked = check(
            resolve_plan(plan, stage_model, options), stage_model, dist.get_backend(mesh.get_group(0))
        )
        unsplit_plan = checked.plan
        built.append(stages.build_stage(stage_model, index))
        checked = checked.of_stage(stages.absent[index])
        applied.append(split(checked, choose_way(checked, meshes_of(mesh), experts, sum_over_cp=True)))
    return PipelinedModel(built, stages.shared, unsplit_plan), applied


def refuse_stages(model: nn.Module, pp: int) -> None:
    """Raise PlanError if `model` can't have `pp` stages: it has fewer blocks, or it balances its routers."""
    blocks = len(find_decoder(model, required=False).names)
    if pp > max(blocks, 1):
        raise PlanError(
            f"pp = {pp}: {type(model).__name__} has {counted(blocks, 'block')}, and each stage needs one: "
            f"{blocks} stages at most"
        )
    if pp > 1 and (reason := balance_fault(model)) is not None:
        raise PlanError(f"pp = {pp}: {reason}")


def refuse_unequal_stages(model: nn.Module, pp: int, inputs: Mapping[str, Any]) -> None:
    """Refuse `pp` stages that do not compute what `model` computes from `inputs`, keyword arguments of its forward.

    Raises:
        PlanError: names the first block that differs; or the model does not run.
    """
    decoder = find_decoder(model)
    try:
        with torch.random.fork_rng(), widened(next(model.parameters()).dtype):
            traced = trace(copy.deepcopy(model), decoder, inputs)
            check_stages(model, Stages(model, traced, starts_of(len(decoder.names), pp)), inputs)
    except ParallelError as error:
        raise PlanError(f"pp = {pp}: {type(model).__name__} can't be split into stages: {error}") from error
    except FAILURES as error:
        raise does_not_run(model, error, "in its first forward") from error


def starts_of(blocks: int, stages: int) -> list[int]:
    """Return the index of the first block of each stage in a proof."""
    return [index * blocks // stages for index in range(stages)]


StageBatch = tuple[int, int]
"""Indices of a stage and of a micro batch."""


def run_in_order(
    stages: Sequence[Stage],
    schedule: str,
    microbatches: int,
    forward: Callable[[int, Stage, Sequence[torch.Tensor]], Any],
    loss: Callable[[int, Any], torch.Tensor],
) -> None:
    """Run the forwards and backwards of all stages in the order of a schedule with all stages on one rank.

    Args:
        stages: the stages in order.
        schedule: the name of torch's class without "Schedule".
        microbatches: the number of micro batches.
        forward: runs one forward; it takes the index of a micro batch, a stage, and the tensors received from the previous
            stage.
        loss: returns the loss; it takes the index of a micro batch and the output of the last stage.
    """
    received: dict[StageBatch, list[torch.Tensor]] = {}
    outputs: dict[StageBatch, list[torch.Tensor]] = {}
    saved_for_weights: dict[StageBatch, Any] = {}
    for index, kind, batch in merge_orders(orders(schedule, 1, len(stages), microbatches)):
        here, is_last = (index, batch), index == len(stages) - 1
        weights = list(stages[index].model.parameters())
        if kind == "forward":
            sent = outputs.get((index - 1, batch), [])
            # Detach the tensors, as if they were sent: a backward of this stage ends at them.
            received[here] = [x.detach().requires_grad_(x.requires_grad) for x in sent]
            output = forward(batch, stages[index], received[here])
            outputs[here] = [loss(batch, output)] if is_last else list(copy_views(output))
            continue
        own_outputs = outputs[here]
        gradients = (
            [torch.ones_like(own_outputs[0])] if is_last else [x.grad for x in received[index + 1, batch]]
        )
        pairs = list(zip(own_outputs, gradients, strict=True))
        if kind == "backward_input" and index > 0:
            filled = [torch.zeros_like(x) if gradient is None else gradient for x, gradient in pairs]
            _, saved_for_weights[here] = backward_of_inputs(own_outputs, filled, received[here], weights)
        elif kind == "backward_weight" and index > 0:
            backward_of_weights(weights, saved_for_weights[here])
        # As in torch, the first stage's "backward_input" does nothing, and its "backward_weight" is the full backward.
        elif kind != "backward_input":
            used = [(x, gradient) for x, gradient in pairs if x.requires_grad and gradient is not None]
            torch.autograd.backward([x for x, _ in used], [gradient for _, gradient in used])
