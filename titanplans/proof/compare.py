"""One case: the split model's step beside the whole one's, quantity by quantity."""

from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from titanplans.proof import step
from titanplans.proof.reference import Reference
from titanplans.proof.report import Check
from titanplans.proof.tolerance import difference, largest
from titanplans.proof.world import World, wholes
from titanplans.tensor_parallel.gradients import align_gradients


class Comparison(NamedTuple):
    """What was compared, and which gradients could not be."""

    checks: tuple[Check, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


class _Worst:
    """The worst difference of one kind, in units."""

    def __init__(self, what: str, tolerance: float):
        self.what, self.tolerance, self.error, self.where = what, tolerance, 0.0, ""

    def see(self, error: float, where: str) -> None:
        if error > self.error:
            self.error, self.where = error, where

    def check(self) -> Check:
        return Check(self.what, self.error, self.tolerance, self.where)


def compare(model: nn.Module, reference: Reference, world: World) -> Comparison:
    """Take one step with the split `model` and compare it with the `reference`'s."""
    tolerance = reference.tolerance
    other_losses = [f"{name} loss" for name in reference.losses] if world.ranked else []
    kinds = ["loss", *other_losses, "logits", "gradients", "replicas", "norm", "AdamW"]
    worst = {kind: _Worst(kind, tolerance) for kind in kinds}
    worst["replicas"] = replicas = _Worst("replicas", 0.0 if world.exact else tolerance)
    worst["tied"] = tied = _Worst("tied", 0.0)

    def see(
        what: str, tensor: torch.Tensor, expected: torch.Tensor, unit: float | torch.Tensor, where: str
    ) -> None:
        values = wholes(tensor, world)
        if world.first:
            worst[what].see(max(in_units(value, expected, unit) for value in values), where)
            _see_replicas(replicas, values, where or what)

    def see_tied(when: str) -> None:
        parameters = dict(model.named_parameters(remove_duplicate=False))
        for names in reference.tied:
            if len({id(parameters.get(name)) for name in names}) > 1:
                tied.see(float("inf"), f"{' and '.join(names)}, {when}")

    see_tied("split")
    for name, param in model.named_parameters():
        if isinstance(param, DTensor) and all(p.is_replicate() for p in param.placements):
            _see_replicas(replicas, world.every(param.detach()), name)

    logits, loss = reference.run_step(model)
    # These read off their process group which shard of the vocabulary is theirs.
    others = reference.other_losses(logits) if world.ranked else {}
    with torch.no_grad():
        see("loss", loss, reference.loss, reference.loss_unit, "")
        see("logits", logits, reference.logits, reference.logits_unit, "")
        for key, value in others.items():
            see(f"{key[0]} loss", value, reference.others[key], reference.other_units[key], key[1])
        align_gradients(model.parameters())
        missing, unexpected = [], []
        for name, param in model.named_parameters():
            expected = reference.gradients.get(name)
            if param.grad is None or expected is None:
                missing += [name] if expected is not None else []
                unexpected += [name] if param.grad is not None else []
            else:
                see("gradients", param.grad, expected, reference.units[name], name)
        missing += sorted(reference.gradients.keys() - dict(model.named_parameters()).keys())
        see("norm", step.gradient_norm(model), reference.norm, reference.norm_unit, "")
        step.adamw_step(model)
        for name, param in model.named_parameters():
            if name in reference.weights:
                see("AdamW", param.detach(), reference.weights[name], reference.weight_units[name], name)
    see_tied("after AdamW")

    kinds += ["tied"] * bool(reference.tied)
    return Comparison(tuple(worst[kind].check() for kind in kinds), tuple(missing), tuple(unexpected))


def in_units(value: torch.Tensor, expected: torch.Tensor, unit: float | torch.Tensor) -> float:
    """Return the largest difference of two plain tensors in units of `unit`, one number or one an element."""
    if isinstance(unit, float):
        return difference(value, expected) / unit
    if value.shape != expected.shape:
        return float("inf")
    return difference((value - expected) / unit, torch.zeros_like(expected))


def _see_replicas(worst: _Worst, values: list[torch.Tensor], where: str) -> None:
    first, *others = values
    unit = torch.finfo(first.dtype).eps * largest(first)
    for value in others:
        apart = difference(value, first)
        worst.see(apart / unit if unit else apart and float("inf"), where)
