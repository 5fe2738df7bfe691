"""A plan in the form of a dict of torch's parallel styles, for NeMo Automodel, NeMo-RL and torch's `parallelize_module`.

Configs of NeMo Automodel and NeMo-RL name the plan by its path:

    tp_plan: titanplans.integrations.automodel.plan                  # Automodel, in the section of FSDP2
    custom_parallel_plan: titanplans.integrations.automodel.plan     # NeMo-RL, in dtensor_cfg
"""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from titanplans.apply.apply import apply_plan
from titanplans.plan.custom import PlanSource


class RegisteredPlan(ParallelStyle):
    """A style for the whole model, which applies the model's plan with `apply_plan`.

    Args:
        plan, derive: arguments of `apply_plan`. By default the plan that is registered for the model.
        loss_parallel: whether the logits stay sharded over the vocabulary. Most of these libraries' loops compute the loss
            from plain logits: then use False.
        sequence_parallel: whether the sequence is sharded between regions; its length must then be a multiple of the degree.
    """

    def __init__(
        self,
        plan: PlanSource = None,
        *,
        derive: bool = False,
        loss_parallel: bool = False,
        sequence_parallel: bool = True,
    ) -> None:
        self.plan, self.derive = plan, derive
        self.loss_parallel, self.sequence_parallel = loss_parallel, sequence_parallel

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        apply_plan(
            module,
            device_mesh,
            plan=self.plan,
            derive=self.derive,
            loss_parallel=self.loss_parallel,
            sequence_parallel=self.sequence_parallel,
        )
        return module


def plan() -> dict[str, ParallelStyle]:
    """Return the plan for any registered architecture, with gathered logits. Its key "" stands for the model itself."""
    return {"": RegisteredPlan()}
