"""A model cut into the stages of a pipeline, all of them on each rank of the proof.

So nothing is sent; which blocks a stage has, what passes between stages, shared parameters and the schedule's order are as
in a job. As on several ranks, a stage gets leaves of its own, and its backward begins with their gradients.
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
from titanplans.torch_private.pipelining import backward_of_inputs, backward_of_weights, without_views


class PipelinedModel(nn.Module):
    """The stages of a model, called as the model is. Parameters have the names that the model gives them.

    Args:
        stages: in their order, split.
        shared: of each parameter that several stages hold, its name in each, by its name in the unsplit model.
        plan: of the unsplit model.
    """

    def __init__(self, stages: Sequence[Stage], shared: Mapping[str, Mapping[int, str]], plan: ResolvedPlan):
        super().__init__()
        self.stages, self._whole_names, self.plan = stages, shared, plan
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
            crossing: Any = ()
            for stage in stages:
                crossing = stage.run(crossing, functools.partial(stage.model, **inputs))
            return crossing

        self.forward = forward

    def named_modules(self, *args: Any, **kwargs: Any) -> Generator[tuple[str, nn.Module], None, None]:
        """Yield each module that computes a part of the unsplit model's forward, as its first stage holds it."""
        seen = set()
        for stage in self.stages:
            for name, module in stage.model.named_modules():
                holds_blocks = any(within(block, name) for block in self.plan.decoder.names)
                if name not in seen and not holds_blocks and not isinstance(module, AbsentModule):
                    seen.add(name)
                    yield name, module

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield each parameter of the unsplit model once, as its first stage holds it, by its name in that model."""
        copies = self.shared.duplicates()
        whole_names = {
            (at, held): whole for whole, names in self._whole_names.items() for at, held in names.items()
        }
        for at, stage in enumerate(self.stages):
            for name, parameter in stage.model.named_parameters():
                if id(parameter) not in copies:
                    yield whole_names.get((at, name), name), parameter

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Yield all parameters, also those that another stage holds, too."""
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
    """Return the stages of copies of `model`, each split over `mesh`, and `experts`, as `apply_plan` takes them.

    Raises:
        PlanError: strict application refuses the plan.
    """
    stages = Stages(model, traced, starts_of(len(find_decoder(model).names), options.degrees.pp))
    made, applied = [], []
    for number in range(len(stages)):
        part = copy.deepcopy(model)
        checked = check(resolve_plan(plan, part, options), part, dist.get_backend(mesh.get_group(0)))
        unsplit_plan = checked.plan
        made.append(stages.build_stage(part, number))
        checked = checked.of_stage(stages.absent[number])
        applied.append(split(checked, choose_way(checked, meshes_of(mesh), experts, sum_over_cp=True)))
    return PipelinedModel(made, stages.shared, unsplit_plan), applied


def refuse_stages(model: nn.Module, number: int) -> None:
    """Refuse a number of stages into which `model` can't be cut.

    Raises:
        PlanError: it has fewer blocks, or balances its routers.
    """
    blocks = len(find_decoder(model, required=False).names)
    if number > max(blocks, 1):
        raise PlanError(
            f"pp = {number}: {type(model).__name__} has {counted(blocks, 'block')}, and each stage needs one: "
            f"{blocks} stages at most"
        )
    if number > 1 and (reason := balance_fault(model)) is not None:
        raise PlanError(f"pp = {number}: {reason}")


def refuse_unequal_stages(model: nn.Module, number: int, inputs: Mapping[str, Any]) -> None:
    """Refuse stages that do not compute what `model` computes of `inputs`, keyword arguments of its forward.

    Raises:
        PlanError: names the first block that differs, or the model does not run.
    """
    decoder = find_decoder(model)
    try:
        with torch.random.fork_rng(), widened(next(model.parameters()).dtype):
            traced = trace(copy.deepcopy(model), decoder, inputs)
            check_stages(model, Stages(model, traced, starts_of(len(decoder.names), number)), inputs)
    except ParallelError as error:
        raise PlanError(
            f"pp = {number}: {type(model).__name__} can't be split into stages: {error}"
        ) from error
    except FAILURES as error:
        raise does_not_run(model, error, "in its first forward") from error


def starts_of(blocks: int, stages: int) -> list[int]:
    """Return the index of the first block of each stage in a proof."""
    return [at * blocks // stages for at in range(stages)]


Place = tuple[int, int]
"""Numbers of a stage and of a micro batch."""


def run_in_order(
    stages: Sequence[Stage],
    schedule: str,
    microbatches: int,
    forward: Callable[[int, Stage, Sequence[torch.Tensor]], Any],
    loss: Callable[[int, Any], torch.Tensor],
) -> None:
    """Run forwards and backwards of all stages, in the order that the schedule of this name has with all on one rank.

    `forward` takes a micro batch's number, a stage, and what the stage before has made; `loss` the number, and what the last
    stage has returned.
    """
    taken: dict[Place, list[torch.Tensor]] = {}
    given: dict[Place, list[torch.Tensor]] = {}
    left: dict[Place, Any] = {}
    for at, kind, number in merge_orders(orders(schedule, 1, len(stages), microbatches)):
        here, last = (at, number), at == len(stages) - 1
        weights = list(stages[at].model.parameters())
        if kind == "forward":
            before = given.get((at - 1, number), [])
            taken[here] = [x.detach().requires_grad_(x.requires_grad) for x in before]
            output = forward(number, stages[at], taken[here])
            given[here] = [loss(number, output)] if last else list(without_views(output))
            continue
        made = given[here]
        gradients = [torch.ones_like(made[0])] if last else [x.grad for x in taken[at + 1, number]]
        pairs = list(zip(made, gradients, strict=True))
        if kind == "backward_input" and at > 0:
            filled = [torch.zeros_like(x) if gradient is None else gradient for x, gradient in pairs]
            _, left[here] = backward_of_inputs(made, filled, taken[here], weights)
        elif kind == "backward_weight" and at > 0:
            backward_of_weights(weights, left[here])
        elif kind != "backward_input":  # of the first stage torch leaves all to the backward of its weights
            used = [(x, gradient) for x, gradient in pairs if x.requires_grad and gradient is not None]
            torch.autograd.backward([x for x, _ in used], [gradient for _, gradient in used])
