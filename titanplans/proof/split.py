"""The split model's training step on one rank, and how far it came."""

import copy

import torch
from torch import nn

from titanplans.proof.record import Recorder, gradient_key
from titanplans.proof.reference import Reference
from titanplans.proof.world import World
from titanplans.tensor_parallel.apply import apply_plan
from titanplans.tensor_parallel.custom import PlanSource
from titanplans.tensor_parallel.plan import Plan, TPOptions

SPLITTING = "while it is split"


class SplitStep:
    """A copy of the whole model, to be split and to take its step.

    Attributes:
        model: split, once `split` has returned.
        styles: of its plan, by fully qualified name.
        logits: DTensors where the plan leaves them sharded.
        loss: a plain scalar.
        record: what its modules gave.
        gradients: by name, as the backward left them: Partial ones are not yet summed.
        place: where the step is, or broke off, in words.
    """

    model: nn.Module
    styles: Plan
    logits: torch.Tensor
    loss: torch.Tensor

    def __init__(self, reference: Reference):
        self.reference = reference
        self.place = SPLITTING
        self.record = Recorder(reference.pristine)  # of nothing: a rank may break off before its step begins
        self.gradients: dict[str, torch.Tensor] = {}

    def split(self, plan: PlanSource, options: TPOptions, world: World) -> None:
        """Split the model over the ranks of `world`.

        Raises:
            PlanError: strict application refuses the plan.
        """
        self.model = copy.deepcopy(self.reference.pristine)
        applied = apply_plan(
            self.model,
            world.mesh,
            plan=plan,
            loss_parallel=options.loss_parallel,
            sequence_parallel=options.sequence_parallel,
            sequence_dim=options.sequence_dim,
        )
        self.styles = applied.styles
        world.settle(self.model)

    def run(self) -> None:
        """Run forward and backward."""
        self.record = Recorder(self.model)
        try:
            with self.record:
                self.logits, self.loss = self.reference.run_step(self.model)
        finally:
            self.place = _last(self.record)
        self.place = "after the backward"
        self.gradients = {n: p.grad for n, p in self.model.named_parameters() if p.grad is not None}


def _last(record: Recorder) -> str:
    """Return where a step broke off."""
    if record.running:
        last = record.running[-1]
        inside = bool(record.order) and (not last or record.order[-1].startswith(f"{last}."))
        after = f" after {record.order[-1]}" if inside else ""
        return f"in {last or 'the model'}{after}"
    came_back = [key for key in record.order if gradient_key(key) in record.tensors]
    return f"in the backward of {came_back[0]}" if came_back else "in the loss"
