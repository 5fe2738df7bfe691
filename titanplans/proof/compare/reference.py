"""The unsplit model's training: each quantity that is compared, and its rounding unit. Start at `ReferenceRun`."""

import copy
import math
from collections.abc import Iterator, Mapping
from functools import cached_property

import torch
from torch import nn

from titanplans.errors import PlanError
from titanplans.plan.checks.shared import tied_parameters
from titanplans.proof.batches.conditions import Scenario
from titanplans.proof.batches.sample import Sampler, freeze, moved
from titanplans.proof.batches.script import write_script
from titanplans.proof.compare import tolerance
from titanplans.proof.compare.forward import FAILURES, Loss, call, does_not_run, widened
from titanplans.proof.compare.tolerance import Tolerance
from titanplans.proof.compare.training import TrainingRun
from titanplans.split.decoder import find_decoder
from titanplans.split.stages.trace import Trace, logits_of, trace

Point = tuple[str, str, str]
"""The name of a point of the training (titanplans/proof/compare/training.py), the kind of a quantity, and its name."""


class ReferenceRun:
    """The unsplit model's training, and perturbed repetitions of it that measure the rounding units.

    Args:
        pristine: the unsplit model, on its device, with random weights. Only copies of it run.
        scenario: the training's conditions.
        sampler: makes the batches.
        seed: seed of the perturbations.
        losses: further losses by name, compared at the logits.
        ranks: the largest number of ranks, tp x cp, of a split model that is compared with this reference.
        recording: record the modules' outputs and their gradients.
        further: True: the dtype is not the proof's main dtype, and rounding may hide the effect of a wrong plan. False: a
            model whose rounding hides it is refused.

    Attributes:
        pristine: the model in the scenario's dtype, with its frozen parameters.
        expected: each quantity at each point.
        units: the unit of each quantity at each point.
        orders: by point, the keys of the modules' outputs in the order in which they finished, if recording.
        tolerance: number of units by which a correct plan may differ.
        tied: groups of names of tied parameters.
        draws: number of perturbed trainings that measured the units.

    Raises:
        PlanError: the model does not run here, or its own rounding hides the effect of a wrong plan.
    """

    def __init__(
        self,
        pristine: nn.Module,
        scenario: Scenario,
        sampler: Sampler,
        seed: int = 0,
        losses: Mapping[str, Loss] | None = None,
        *,
        ranks: int = 2,
        recording: bool = False,
        further: bool = False,
    ):
        self.ranks, self.further = ranks, further
        self.scenario, self.losses, self.recording = scenario.unsplit, losses or {}, recording
        self.seed, dtype = seed, getattr(torch, scenario.dtype)
        self.pristine = pristine
        if scenario.frozen or dtype != next(pristine.parameters()).dtype:
            self.pristine = copy.deepcopy(pristine).to(dtype)
        if scenario.frozen:
            freeze(self.pristine, scenario.frozen)
        self.tied = tied_parameters(self.pristine)
        self.units: dict[Point, float] = {}
        self._newest: TrainingRun | None = None
        try:
            self._run(sampler)
        except PlanError:
            raise
        except FAILURES as error:
            raise does_not_run(pristine, error, self._place()) from error

    def _run(self, sampler: Sampler) -> None:
        device = next(self.pristine.parameters()).device
        shape = None
        if sampler.fixed:
            with torch.no_grad():
                inputs = sampler.tokens(self.scenario.steps[0][0], 0)
                inputs = moved(inputs, device, next(self.pristine.parameters()).dtype)
                shape = logits_of(call(copy.deepcopy(self.pristine), inputs)).shape
        self.script = write_script(self.scenario, sampler, device, shape)
        training = self._training()
        self.expected = dict(quantities(training))
        self.orders = {point: record.order for point, record in training.records.items()}
        logits = [tensor for (_, what, _), tensor in self.expected.items() if what == "logits"]
        self.tolerance = Tolerance(
            training.model, max(logits, key=torch.Tensor.numel), len(self.script.steps)
        )
        self._optimizer = training.optimizer
        self._changes = dict.fromkeys(self.expected, 0.0)
        self.draws = 0
        # A recorded reference explains a case that has already failed with all `DRAWS`.
        self.draw(tolerance.DRAWS if self.recording else tolerance.FIRST_DRAWS)

    def draw(self, count: int) -> None:
        """Measure the units again, with more perturbed trainings until there are `count` in all.

        Raises:
            PlanError: rounding hides the effect of a wrong plan.
        """
        for draw in range(self.draws, count):
            for key, tensor in quantities(self._training(draw)):
                change = self.tolerance.difference(tensor, self.expected[key])
                self._changes[key] = max(self._changes[key], change)
        self.draws = count
        self.units = self._measured_units()
        self._refuse_undecidable()

    def training(self, model: nn.Module, *, fused: bool = False) -> TrainingRun:
        """Return the training of `model`, before its first step.

        Args:
            model: a copy of `pristine`, unsplit or split.
            fused: the head computes the loss in the last step.
        """
        return TrainingRun(model, self.script, self.losses, recording=self.recording, fused=fused)

    @cached_property
    def trace(self) -> Trace:
        """The trace of a forward of the first batch: what passes between the blocks, for pipeline stages."""
        model, first = copy.deepcopy(self.pristine), self.script.steps[0][0]
        with widened(next(model.parameters()).dtype):
            return trace(model, find_decoder(model), first.inputs)

    def _training(self, draw: int | None = None) -> TrainingRun:
        model = copy.deepcopy(self.pristine)
        if draw is not None:
            tolerance.perturb(model, self.seed + draw)
        self._newest = self.training(model)
        return self._newest

    def _place(self) -> str:
        return "before its training" if self._newest is None else self._newest.place

    def _measured_units(self) -> dict[Point, float]:
        eps = self.tolerance.eps
        roundings = {key: self.tolerance.rounding(self.expected[key]) for key in self._changes}
        # A gradient of exactly zero has no scale, so it gets the largest rounding of the other gradients.
        scale = max((unit for key, unit in roundings.items() if key[1] == "gradients"), default=0.0) or eps
        measured = {
            key: max(roundings[key], change) or (scale if key[1] == "gradients" else eps)
            for key, change in self._changes.items()
        }
        if self.tolerance.checks:
            measured |= self._pooled(measured)
        if self.tolerance.exact:
            steps = len(self.script.steps)
            for key in [key for key in measured if key[1] == "AdamW"]:
                largest = max(
                    measured.get((f"step {n}", "gradients", key[2]), 0.0) for n in range(1, steps + 1)
                )
                measured[key] = tolerance.weight_unit(self.expected[key], largest, steps, self._optimizer)
        return measured

    def _pooled(self, units: Mapping[Point, float]) -> dict[Point, float]:
        """Return the units of losses and norms in 16 bits: the size of each, times the largest relative unit of its kind
        so far."""
        largest = {"norm": self.tolerance.eps}
        pooled = {}
        for key in filter(lambda key: self.tolerance.compares(key[1]), units):
            size = self.tolerance.size(self.expected[key])
            largest[key[1]] = max(largest.get(key[1], 0.0), units[key] / size if size else 0.0)
            pooled[key] = max(units[key], largest[key[1]] * size)
        return pooled

    def _refuse_undecidable(self) -> None:
        """Raise PlanError if the tolerances would accept wrong gradients."""
        name, first = type(self.pristine).__name__, "step 1, batch 1"
        gradients = {
            key: t for key, t in self.expected.items() if key[1] == "gradients" and key[0] == "step 1"
        }
        if not gradients:
            raise PlanError(
                f"{name}: no parameter gets a gradient, so there is nothing to prove: unfreeze some"
            )
        sizes = {key: self.tolerance.size(tensor) for key, tensor in gradients.items()}
        checked = {
            what: (self.units[first, what, ""], self.tolerance.size(self.expected[first, what, ""]))
            for what in ("loss", "logits")
        }
        if self.tolerance.exact:
            worst = max(gradients, key=self.units.__getitem__)
            checked[f"gradient of {worst[2]}"] = self.units[worst], max(sizes.values())
        dtype, allowed = self.scenario.dtype, self.tolerance.allowed(self.ranks)
        for what, (unit, size) in checked.items():
            if not math.isfinite(unit) or not math.isfinite(size):
                raise PlanError(f"{name}, unsplit, in {dtype}: the {what} is not finite: try another seed")
            if not self.further and self.tolerance.hides(unit, size, self.ranks):
                relative = unit / size if size else math.inf
                raise PlanError(
                    f"{name} in {dtype}: one rounding of every weight moves the {what} by {relative:.1e} of its "
                    f"size, and {allowed:.0f} such roundings could hide a wrong plan: use float64, set dropout and "
                    "other randomness to 0, or prove a smaller model"
                )


def quantities(training: TrainingRun) -> Iterator[tuple[Point, torch.Tensor]]:
    """Run `training`, and yield each quantity at each point, then the recorded outputs and gradients by their keys."""
    for point, at_point in training.points():
        yield from (((point, *key), tensor) for key, tensor in at_point.items())
    for point, record in training.records.items():
        yield from (((point, "outputs", key), tensor) for key, tensor in record.tensors.items())
