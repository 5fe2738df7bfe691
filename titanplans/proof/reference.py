"""The whole model's step, run once, and the unit of each of its quantities."""

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


class Reference:
    """The whole model after one step.

    Args:
        pristine: the model, on its device, in its dtype, randomised, that has never run and never will.
        inputs: keyword arguments of its forward.
        seed: of labels and perturbations.
        losses: further ones than ours, by name; compared where they leave the model, at its logits.

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
        try:
            logits = step.forward(model, inputs)
            self.labels = labels_for(logits, seed)
            self.loss = step.backward(logits, self.labels)
        except step.FAILURES as error:
            device = next(model.parameters()).device.type
            raise PlanError(
                f"{type(model).__name__}, unsplit, does not run on {device}: {step.first_line(error)}; if its kernels need "
                "a GPU, prove it there under torchrun (ranks='process_group', or --process-group)"
            ) from error
        self.logits = logits.detach()
        self.others = self.other_losses(self.logits)
        self.gradients = _gradients(model)
        self.norm = step.gradient_norm(model)
        self.tolerance = tolerance.depth(model, self.logits)
        optimizer = step.adamw_step(model)
        self.weights = {name: param.detach().clone() for name, param in model.named_parameters()}
        self._measure(model, start)
        self._refuse_undecidable()
        self.weight_units = {
            name: tolerance.step_unit(
                weight, self.gradients.get(name), self.units.get(name, 0.0), self.tolerance, optimizer
            )
            for name, weight in self.weights.items()
        }
        self._recorded: tuple[Recorder, dict[str, float]] | None = None

    def _measure(self, model: nn.Module, start: dict[str, torch.Tensor]) -> None:
        """Measure the units, by gradients' names and as `loss_unit`, `logits_unit`, `norm_unit`."""
        eps = torch.finfo(self.loss.dtype).eps
        units = {name: eps * largest(gradient) for name, gradient in self.gradients.items()}
        loss, logits, norm = (eps * largest(t) for t in (self.loss, self.logits, self.norm))
        self.other_units = {key: eps * largest(value) or eps for key, value in self.others.items()}
        for draw in range(tolerance.DRAWS):
            tolerance.perturb(model, start, self.seed + draw)
            model.zero_grad()
            moved_logits, moved_loss = self.run_step(model)
            loss = max(loss, difference(moved_loss, self.loss))
            logits = max(logits, difference(moved_logits, self.logits))
            for key, value in self.other_losses(moved_logits).items():
                moved_by = difference(value, self.others[key])
                self.other_units[key] = max(self.other_units[key], moved_by)
            norm = max(norm, difference(step.gradient_norm(model), self.norm))
            moved = _gradients(model)
            units = {
                name: max(unit, difference(moved[name], self.gradients[name])) for name, unit in units.items()
            }
        # A gradient that is exactly zero has no scale of its own; its siblings' is taken.
        scale = eps * max(map(largest, self.gradients.values()), default=1.0)
        self.units = {name: unit or scale for name, unit in units.items()}
        self.loss_unit, self.logits_unit, self.norm_unit = loss or eps, logits or eps, norm or eps

    def other_losses(self, logits: torch.Tensor) -> dict[tuple[str, str], torch.Tensor]:
        """Return value and gradient of each further loss, by its name and by "" or "its gradient"."""
        found = {}
        for name, loss in self.losses.items():
            found[name, ""], found[name, "its gradient"] = step.at_logits(logits, self.labels, loss)
        return found

    def _refuse_undecidable(self) -> None:
        """Refuse a model of which a tolerance would accept a wrong gradient."""
        name = type(self.pristine).__name__
        if not self.gradients:
            raise PlanError(
                f"{name}: no parameter gets a gradient, so there is nothing to prove: unfreeze some"
            )
        worst = max(self.gradients, key=lambda gradient: self.units[gradient])
        sizes = {
            "loss": (self.loss_unit, largest(self.loss)),
            "logits": (self.logits_unit, largest(self.logits)),
            f"gradient of {worst}": (self.units[worst], max(map(largest, self.gradients.values()))),
        }
        for what, (unit, size) in sizes.items():
            if not math.isfinite(unit) or not math.isfinite(size):
                raise PlanError(
                    f"{name}, unsplit, in {self.loss.dtype}: the {what} is not finite: try another seed"
                )
            if self.tolerance * unit > tolerance.DECIDABLE * size:
                share = unit / size if size else math.inf
                raise PlanError(
                    f"{name} in {self.loss.dtype}: one rounding of every weight moves the {what} by {share:.1e} of its "
                    f"size, and {self.tolerance:.0f} such roundings could hide a wrong plan: use float64, set dropout and "
                    "other randomness to 0, or prove a smaller model"
                )

    def run_step(self, model: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
        """Run a step of `model`, this one or a split one, to the end of its backward; return logits and loss."""
        logits = step.forward(model, self.inputs)
        return logits.detach(), step.backward(logits, self.labels)

    def recorded(self) -> tuple[Recorder, dict[str, float]]:
        """Return what every module gives in a run, and the unit of each; runs the model at the first call."""
        if self._recorded is None:
            record, moved = self._record(None), self._record(self.seed)
            eps = torch.finfo(self.loss.dtype).eps
            units = {
                key: max(eps * largest(tensor), difference(moved.tensors[key], tensor)) or eps
                for key, tensor in record.tensors.items()
                if key in moved.tensors
            }
            self._recorded = record, units
        return self._recorded

    def _record(self, seed: int | None) -> Recorder:
        model = copy.deepcopy(self.pristine)
        if seed is not None:
            tolerance.perturb(model, dict(self.pristine.named_parameters()), seed)
        with Recorder(model) as record:
            self.run_step(model)
        return record


def _gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}
