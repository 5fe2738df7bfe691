"""The whole model's step, run once: the quantities that a split model is compared by, and the unit of each."""

import copy
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from titanplans.errors import PlanError
from titanplans.proof import step, tolerance
from titanplans.proof.record import Recorder
from titanplans.proof.sample import labels_for
from titanplans.proof.tolerance import difference, largest
from titanplans.tensor_parallel.checks import tied_parameters
from titanplans.tensor_parallel.gradients import align_gradients, total_norm

Key = tuple[str, str]
"""A quantity's kind ("loss", "gradients", …) and which one of its kind: a parameter, or "" for the only one."""


class Reference:
    """The whole model after one step.

    Args:
        pristine: the model, on its device, in its dtype, randomised, that has never run and never will.
        inputs: keyword arguments of its forward.
        seed: of labels and perturbations.
        losses: further ones than ours, by name; compared where they leave the model, at its logits.

    Attributes:
        expected: each quantity, of kind loss, "<name> loss", logits, gradients, norm, AdamW (weights after the step),
            and outputs, which are those of the modules and their gradients under the keys of a `Recorder`.
        units: of each quantity; one number, or one for each element of a weight after the step.
        order: keys of the modules' outputs as they finished.
        tolerance: how many units a right plan may be off.
        tied: names of parameters that are one, group by group.

    Raises:
        PlanError: it does not run here, or its own rounding hides what a wrong plan would do.
    """

    def __init__(
        self,
        pristine: nn.Module,
        inputs: Mapping[str, Any],
        seed: int,
        losses: Mapping[str, step.Loss] | None = None,
    ):
        self.pristine, self.inputs, self.seed, self.losses = pristine, inputs, seed, losses or {}
        model = copy.deepcopy(pristine)
        start = {name: param.detach().clone() for name, param in model.named_parameters()}
        self.tied = tied_parameters(model)
        record = Recorder(model)
        try:
            with record:
                logits = step.forward(model, inputs)
                self.labels = labels_for(logits, seed)
                loss = step.backward(logits, self.labels)
        except step.FAILURES as error:
            device = next(model.parameters()).device.type
            raise PlanError(
                f"{type(model).__name__}, unsplit, does not run on {device}: {step.first_line(error)}; if its kernels need "
                "a GPU, prove it there under torchrun (ranks='process_group', or --process-group)"
            ) from error
        self.order = record.order
        self.tolerance = tolerance.depth(model, logits)
        self.expected = self.quantities(model, logits.detach(), loss) | _outputs(record)
        optimizer = step.adamw_step(model)
        weights = {name: param.detach().clone() for name, param in model.named_parameters()}
        units = self._measured(model, start)
        self._refuse_undecidable(units)
        self.units: dict[Key, float | torch.Tensor] = {**units}
        for name, weight in weights.items():
            gradient, unit = self.expected.get(("gradients", name)), units.get(("gradients", name), 0.0)
            self.expected["AdamW", name] = weight
            self.units["AdamW", name] = tolerance.step_unit(weight, gradient, unit, self.tolerance, optimizer)

    def run_step(self, model: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
        """Run a step of `model`, this one or a split one, to the end of its backward; return logits and loss."""
        logits = step.forward(model, self.inputs)
        return logits.detach(), step.backward(logits, self.labels)

    def quantities(
        self, model: nn.Module, logits: torch.Tensor, loss: torch.Tensor, *, further_losses: bool = True
    ) -> dict[Key, torch.Tensor]:
        """Return what a step is compared by after its backward, of this model or a split one, laid out as it is there.

        Gradients that are still Partial are summed first, in `.grad`.
        """
        found = {("loss", ""): loss}
        for name, other in self.losses.items() if further_losses else ():
            value, gradient = step.at_logits(logits, self.labels, other)
            found |= {(f"{name} loss", ""): value, (f"{name} loss", "its gradient"): gradient}
        align_gradients(model.parameters())
        found["logits", ""] = logits
        found |= {("gradients", n): p.grad for n, p in model.named_parameters() if p.grad is not None}
        found["norm", ""] = total_norm(model.parameters())
        return found

    def _measured(self, model: nn.Module, start: dict[str, torch.Tensor]) -> dict[Key, float]:
        """Return the unit of each quantity of one step; `start` is the weights' values before it."""
        eps = torch.finfo(self.expected["loss", ""].dtype).eps
        units = {key: eps * largest(tensor) for key, tensor in self.expected.items()}
        for draw in range(tolerance.DRAWS):
            tolerance.perturb(model, start, self.seed + draw)
            model.zero_grad()
            with Recorder(model) as record:
                logits, loss = self.run_step(model)
            moved = self.quantities(model, logits, loss) | _outputs(record)
            for key in units.keys() & moved.keys():
                units[key] = max(units[key], difference(moved[key], self.expected[key]))
        # A gradient that is exactly zero has no scale of its own; its siblings' is taken.
        scale = eps * max(map(largest, self._gradients().values()), default=1.0)
        return {key: unit or (scale if key[0] == "gradients" else eps) for key, unit in units.items()}

    def _gradients(self) -> dict[Key, torch.Tensor]:
        return {key: tensor for key, tensor in self.expected.items() if key[0] == "gradients"}

    def _refuse_undecidable(self, units: Mapping[Key, float]) -> None:
        """Refuse a model of which a tolerance would accept a wrong gradient."""
        name, gradients = type(self.pristine).__name__, self._gradients()
        dtype = self.expected["loss", ""].dtype
        if not gradients:
            raise PlanError(
                f"{name}: no parameter gets a gradient, so there is nothing to prove: unfreeze some"
            )
        worst = max(gradients, key=units.__getitem__)
        sizes = {
            "loss": (units["loss", ""], largest(self.expected["loss", ""])),
            "logits": (units["logits", ""], largest(self.expected["logits", ""])),
            f"gradient of {worst[1]}": (units[worst], max(map(largest, gradients.values()))),
        }
        for what, (unit, size) in sizes.items():
            if not math.isfinite(unit) or not math.isfinite(size):
                raise PlanError(f"{name}, unsplit, in {dtype}: the {what} is not finite: try another seed")
            if self.tolerance * unit > tolerance.DECIDABLE * size:
                share = unit / size if size else math.inf
                raise PlanError(
                    f"{name} in {dtype}: one rounding of every weight moves the {what} by {share:.1e} of its "
                    f"size, and {self.tolerance:.0f} such roundings could hide a wrong plan: use float64, set dropout and "
                    "other randomness to 0, or prove a smaller model"
                )


def _outputs(record: Recorder) -> dict[Key, torch.Tensor]:
    return {("outputs", key): tensor for key, tensor in record.tensors.items()}
