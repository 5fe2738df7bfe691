"""A model whose blocks are shared out over the stages of a pipeline, all of them on each rank of the proof.

So nothing is sent, and every other fact of a pipeline holds: which blocks a stage has, what crosses its borders, which
parameters several stages hold, and in which order a schedule computes.
"""

import copy
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from titanplans.apply.apply import AppliedPlan, cut_of, split
from titanplans.apply.check import check
from titanplans.errors import PlanError
from titanplans.plan.custom import PlanSource, resolve_plan
from titanplans.plan.decoder import find_decoder
from titanplans.plan.options import TPOptions
from titanplans.split.gradients import align_gradients, local_of
from titanplans.split.meshes import meshes_of
from titanplans.split.stages.shared import Holder, share_gradients
from titanplans.split.stages.stage import Stage
from titanplans.split.stages.stages import Stages, balance_fault
from titanplans.split.stages.trace import Trace
from titanplans.split.state import border_of_model, make_state


class PipelinedModel(nn.Module):
    """The stages of a model, called as the model is. Parameters have the names that the model gives them.

    Args:
        stages: in their order, split.
        shared: as `Stages.shared`.
    """

    def __init__(self, stages: Sequence[Stage], shared: Sequence[Mapping[int, str]]):
        super().__init__()
        self.stages, self.config = stages, stages[-1].model.config
        for at, stage in enumerate(stages):
            self.add_module(str(at), stage.model)
        of_stage = [dict(stage.model.named_parameters(remove_duplicate=False)) for stage in stages]
        self.shared = [[Holder(0, of_stage[at][name]) for at, name in holders.items()] for holders in shared]
        make_state(self).border = border_of_model(stages[-1].model)

        @functools.wraps(stages[0].model.forward)  # its signature tells which inputs the model takes
        def forward(**inputs: Any) -> Any:
            crossing: Any = ()
            for stage in stages:
                crossing = stage.run(crossing, functools.partial(stage.model, **inputs))
            return crossing

        self.forward = forward

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield each parameter of the whole model once, as its first stage holds it."""
        copies = {id(holder.parameter) for _, *others in self.shared for holder in others}
        for stage in self.stages:
            for name, parameter in stage.model.named_parameters():
                if id(parameter) not in copies:
                    yield name, parameter

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Yield all parameters, also those that another stage holds, too."""
        for stage in self.stages:
            yield from stage.model.parameters()

    @property
    def last(self) -> nn.Module:
        """The model of the last stage."""
        return self.stages[-1].model

    @property
    def agrees(self) -> bool:
        """Whether stages that hold one parameter hold the same values, to the bit."""
        held = [[_values(holder.parameter) for holder in holders] for holders in self.shared]
        return all(one.equal(values[0]) for values in held for one in values)

    def sum_gradients(self) -> None:
        """Give what several stages hold the sum of their gradients, aligned."""
        align_gradients(self.parameters())
        share_gradients(self.shared, next(self.parameters()).device)


def _values(parameter: nn.Parameter | None) -> torch.Tensor:
    assert parameter is not None
    return local_of(parameter)


def split_stages(
    model: nn.Module,
    plan: PlanSource,
    options: TPOptions,
    mesh: DeviceMesh,
    experts: DeviceMesh | None,
    trace: Trace,
) -> tuple[PipelinedModel, list[AppliedPlan]]:
    """Return the stages of copies of `model`, each split over `mesh`, and `experts`, as `apply_plan` takes them.

    Raises:
        PlanError: strict application refuses the plan.
        ParallelError: so many stages are not possible.
    """
    stages = Stages(model, trace, starts_of(len(find_decoder(model).names), options.degrees.pp))
    made, applied = [], []
    for number in range(len(stages)):
        part = copy.deepcopy(model)
        checked = check(resolve_plan(plan, part, options), part, dist.get_backend(mesh.get_group(0)))
        made.append(stages.cut(part, number))
        checked = checked.of_stage(stages.passed[number])
        applied.append(split(checked, cut_of(checked, meshes_of(mesh), experts, sum_over_cp=True)))
    return PipelinedModel(made, stages.shared), applied


def refuse_stages(model: nn.Module, stages: int) -> None:
    """Refuse a number of stages that `model` can't be cut into.

    Raises:
        PlanError: it has fewer blocks, or balances its routers.
    """
    blocks = len(find_decoder(model, required=False).names)
    if stages > max(blocks, 1):
        has = "1 block" if blocks == 1 else f"{blocks} blocks"
        raise PlanError(
            f"pp = {stages}: {type(model).__name__} has {has}, and each stage needs one: {blocks} stages at most"
        )
    if stages > 1 and (reason := balance_fault(model)) is not None:
        raise PlanError(f"pp = {stages}: {reason}")


def starts_of(blocks: int, stages: int) -> tuple[int, ...]:
    """Return at which of so many blocks each stage begins, shared out evenly."""
    return tuple(number * blocks // stages for number in range(stages))
