"""A plan where a loop asks for a dict of torch's parallel styles: NeMo Automodel, NeMo-RL, and `parallelize_module` itself.

Their configs name it by path:

    tp_plan: titanplans.integrations.automodel.plan                  # Automodel, in the section of FSDP2
    custom_parallel_plan: titanplans.integrations.automodel.plan     # NeMo-RL, in dtensor_cfg
"""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from titanplans.apply.apply import apply_plan
from titanplans.plan.custom import PlanSource


class RegisteredPlan(ParallelStyle):
    """The style of a model as such: it applies the model's plan, by `apply_plan`.

    Args:
        plan: as in `apply_plan`; None: the plan that is registered for the model.
        loss_parallel: whether the logits stay sharded over the vocabulary. These loops compute the loss themselves, most of
            them from plain logits.
        sequence_parallel: whether the sequence is sharded between regions; lengths are then multiples of the degree.
    """

    def __init__(
        self, plan: PlanSource = None, *, loss_parallel: bool = False, sequence_parallel: bool = True
    ) -> None:
        self.plan, self.loss_parallel, self.sequence_parallel = plan, loss_parallel, sequence_parallel

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        apply_plan(
            module,
            device_mesh,
            plan=self.plan,
            loss_parallel=self.loss_parallel,
            sequence_parallel=self.sequence_parallel,
        )
        return module


def plan() -> dict[str, ParallelStyle]:
    """Return the plan for any registered architecture, with gathered logits; "" stands for the model itself."""
    return {"": RegisteredPlan()}
