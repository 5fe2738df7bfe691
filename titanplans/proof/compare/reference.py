"""The whole model's training, run once: every quantity that is compared, and its unit."""

import copy
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property

import torch
from torch import nn

from titanplans.errors import PlanError
from titanplans.plan.checks.tied import tied_parameters
from titanplans.proof.batches.conditions import Scenario
from titanplans.proof.batches.sample import Sampler, freeze, moved
from titanplans.proof.batches.script import write_script
from titanplans.proof.compare import tolerance
from titanplans.proof.compare.forward import FAILURES, Loss, call, does_not_run, widened
from titanplans.proof.compare.scale import SCALE, Regression, fit, least_unit, units, watched
from titanplans.proof.compare.tolerance import Tolerance
from titanplans.proof.compare.training import TrainingRun
from titanplans.split.decoder import find_decoder
from titanplans.split.stages.trace import Trace, logits_of, trace

Point = tuple[str, str, str]
"""The name of a point of the training (titanplans/proof/compare/training.py), and a quantity there."""


class ReferenceRun:
    """The whole model after a training.

    Args:
        pristine: the model, on its device, randomised; it never runs.
        scenario: its training.
        sampler: of its batches.
        seed: of perturbations.
        losses: further losses by name, compared at the logits.
        recording: keep the outputs of its modules, and their gradients.
        further: the dtype is not the proof's own: quantities that its rounding hides are listed, not refused.

    Attributes:
        pristine: the model in the scenario's dtype, frozen as the scenario says.
        expected: each quantity at each point.
        units: of each quantity.
        orders: keys of the modules' outputs in the order in which they finished, by point, if recording.
        tolerance: how many units a right plan may be off.
        tied: names of parameters that are one, group by group.
        watched: modules whose scale is compared.
        draws: perturbed trainings that measured the units.
        undecided: gradients of the first step, or its logits, that this dtype's rounding hides.
        shown: the points before the first step whose gradients are mostly hidden by rounding. From there on only replicas
            are compared.
        hidden: there is such a step.
        noise: quantities at the shown points that rounding hides. Three draws don't tell how far they stray.

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
        recording: bool = False,
        further: bool = False,
    ):
        self.further = further
        self.scenario, self.losses, self.recording = scenario.whole, losses or {}, recording
        self.seed, dtype = seed, getattr(torch, scenario.dtype)
        self.pristine = pristine
        if scenario.frozen or dtype != next(pristine.parameters()).dtype:
            self.pristine = copy.deepcopy(pristine).to(dtype)
        if scenario.frozen:
            freeze(self.pristine, scenario.frozen)
        self.tied = tied_parameters(self.pristine)
        self.watched = watched(self.pristine) if dtype.itemsize < 4 else frozenset()
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
                given = sampler.tokens(self.scenario.steps[0][0], 0)
                inputs = moved(given, device, next(self.pristine.parameters()).dtype)
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
        self._changes = dict.fromkeys((key for key in self.expected if key[1] != SCALE), 0.0)
        self._fits: dict[Point, list[Regression]] = {key: [] for key in self.expected if key[1] == SCALE}
        self.draws = 0
        # A recorded reference explains a case that is wrong already.
        self.draw(tolerance.DRAWS if self.recording else tolerance.FIRST_DRAWS)

    def draw(self, number: int) -> None:
        """Measure the units again, by as many perturbed trainings in all.

        Raises:
            PlanError: rounding hides the effect of a wrong plan.
        """
        for draw in range(self.draws, number):
            for key, tensor in quantities(self._training(draw)):
                self._note(key, tensor)
        self.draws = number
        self.units = self._measured()
        self.undecided = self._refuse_undecidable(self.units)
        self.shown = self._shown(list(dict.fromkeys(point for point, *_ in self.expected)))
        self.hidden = len(self.shown) < len({point for point, *_ in self.expected})
        self.noise = frozenset(key for key in self.units if key[0] in self.shown and self._is_hidden(key))

    def training(
        self, model: nn.Module, *, watched: Collection[str] | None = None, fused: bool = False
    ) -> TrainingRun:
        """Return the training of `model`, not yet begun.

        Args:
            model: a copy of `pristine`, whole or split.
            watched: modules whose scale is compared; None for all of `watched`.
            fused: the head computes the loss in the last step.
        """
        watched = self.watched if watched is None else watched
        return TrainingRun(
            model, self.script, self.losses, recording=self.recording, watched=watched, fused=fused
        )

    @cached_property
    def trace(self) -> Trace:
        """What its blocks hand to each other, in a forward of the first batch."""
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

    def _note(self, key: Point, tensor: torch.Tensor) -> None:
        expected = self.expected[key]
        if key in self._fits and (one := fit(tensor, expected)) is not None:
            self._fits[key].append(one)
        if key in self._changes:
            self._changes[key] = max(self._changes[key], self.tolerance.difference(tensor, expected))

    def _measured(self) -> dict[Point, float]:
        """Return the unit of each quantity."""
        eps = self.tolerance.eps
        roundings = {key: self.tolerance.rounding(self.expected[key]) for key in self._changes}
        # A gradient that is exactly zero has no scale of its own, and takes that of the others.
        scale = max((unit for key, unit in roundings.items() if key[1] == "gradients"), default=0.0) or eps
        measured = {
            key: max(roundings[key], change) or (scale if key[1] == "gradients" else eps)
            for key, change in self._changes.items()
        }
        for gradients in (False, True):
            fits = {
                key: found for key, found in self._fits.items() if found and key[2].endswith("'") == gradients
            }
            least = {key: least_unit(eps, self.expected[key], gradients) for key in fits}
            measured |= units(fits, least, tolerance.VISIBLE)
        if self.tolerance.exact:
            steps = len(self.script.steps)
            for key in [key for key in measured if key[1] == "AdamW"]:
                largest = max(
                    measured.get((f"step {n}", "gradients", key[2]), 0.0) for n in range(1, steps + 1)
                )
                measured[key] = tolerance.weight_unit(self.expected[key], largest, steps, self._optimizer)
        return measured

    def _refuse_undecidable(self, units: Mapping[Point, float]) -> tuple[str, ...]:
        """Refuse a model if a tolerance would accept wrong gradients; in further dtypes return the names of those."""
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
            "loss": (units[first, "loss", ""], self.tolerance.size(self.expected[first, "loss", ""])),
            "logits": (units[first, "logits", ""], self.tolerance.size(self.expected[first, "logits", ""])),
        }
        if self.tolerance.exact:
            worst = max(gradients, key=units.__getitem__)
            checked[f"gradient of {worst[2]}"] = units[worst], max(sizes.values())
        dtype, allowed = self.scenario.dtype, self.tolerance.units(2)
        for what, (unit, size) in checked.items():
            if not math.isfinite(unit) or not math.isfinite(size):
                raise PlanError(f"{name}, unsplit, in {dtype}: the {what} is not finite: try another seed")
            if not self.further and allowed * unit > self.tolerance.decidable * size:
                share = unit / size if size else math.inf
                raise PlanError(
                    f"{name} in {dtype}: one rounding of every weight moves the {what} by {share:.1e} of its "
                    f"size, and {allowed:.0f} such roundings could hide a wrong plan: use float64, set dropout and "
                    "other randomness to 0, or prove a smaller model"
                )
        if self.tolerance.exact:
            return ()
        sizes[first, "logits", ""] = checked["logits"][1]
        return tuple(f"{what} {where}".strip() for (_, what, where) in filter(self._is_hidden, sizes))

    def _is_hidden(self, key: Point) -> bool:
        """Whether rounding hides this quantity."""
        if self.tolerance.exact:
            return False
        size = 1.0 if key[1] == SCALE else self.tolerance.size(self.expected[key])
        return self.tolerance.units(2) * self.units[key] > tolerance.VISIBLE * size

    def _shown(self, points: Sequence[str]) -> frozenset[str]:
        """Return the `points` before the first one at which most gradients are hidden."""
        for at, point in enumerate(points):
            hidden = [self._is_hidden(key) for key in self.expected if key[:2] == (point, "gradients")]
            if sum(hidden) > tolerance.CHAOTIC * len(hidden):
                return frozenset(points[:at])
        return frozenset(points)


def quantities(training: TrainingRun) -> Iterator[tuple[Point, torch.Tensor]]:
    """Run `training`, and yield each quantity at each point, then the recorded outputs under a `Recorder`'s keys."""
    for point, found in training.points():
        yield from (((point, *key), tensor) for key, tensor in found.items())
    for point, record in training.records.items():
        yield from (((point, "outputs", key), tensor) for key, tensor in record.tensors.items())
