"""One case: the split model's step beside the whole one's, quantity by quantity."""

import torch

from titanplans.proof import step
from titanplans.proof.reference import Key, Reference
from titanplans.proof.report import CaseResult, Check
from titanplans.proof.split import SplitStep
from titanplans.proof.tolerance import difference, largest
from titanplans.proof.world import World, wholes
from titanplans.tensor_parallel.plan import TPOptions


def compare(split: SplitStep, options: TPOptions, reference: Reference, world: World) -> CaseResult:
    """Compare a step of the split model, which has run its backward, with the `reference`'s, and take AdamW's."""
    model = split.model
    worst: dict[str, tuple[float, str]] = {}  # the worst difference of each kind, in units, and where

    def note(what: str, error: float, where: str) -> None:
        if error > worst.get(what, (0.0, ""))[0]:
            worst[what] = error, where

    def note_replicas(values: list[torch.Tensor], where: str) -> None:
        first, *others = values
        unit = torch.finfo(first.dtype).eps * largest(first)
        for value in others:
            apart = difference(value, first)
            note("replicas", apart / unit if unit else apart and float("inf"), where)

    def compare_one(key: Key, tensor: torch.Tensor) -> None:
        values = wholes(tensor, world)
        if world.first and key in reference.expected:
            expected, unit, (what, where) = reference.expected[key], reference.units[key], key
            note(what, max(in_units(value, expected, unit) for value in values), where)
            note_replicas(values, where or what)

    found = reference.quantities(model, split.logits, split.loss, further_losses=world.ranked)
    with torch.no_grad():
        for key, tensor in found.items():
            compare_one(key, tensor)
        step.adamw_step(model)
        for name, param in model.named_parameters():
            compare_one(("AdamW", name), param.detach())
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for names in reference.tied:
        if len({id(parameters.get(name)) for name in names}) > 1:
            note("tied", float("inf"), " and ".join(names))

    # Simulated ranks can't tell further losses apart: these read off their process group which shard is theirs.
    kinds = [what for what in dict.fromkeys(what for what, _ in found) if what != "norm"]
    kinds += ["replicas", "norm", "AdamW", *(["tied"] if reference.tied else [])]
    tolerances = {"replicas": 0.0 if world.exact else reference.tolerance, "tied": 0.0}
    checks = []
    for what in kinds:
        error, where = worst.get(what, (0.0, ""))
        checks.append(Check(what, error, tolerances.get(what, reference.tolerance), where))
    wanted = [name for what, name in reference.expected if what == "gradients"]
    got = [name for what, name in found if what == "gradients"]
    return CaseResult(
        options,
        tuple(checks),
        tuple(name for name in wanted if name not in got),
        tuple(name for name in got if name not in wanted),
    )


def in_units(value: torch.Tensor, expected: torch.Tensor, unit: float | torch.Tensor) -> float:
    """Return the largest difference of two plain tensors in units of `unit`, one number or one an element."""
    if isinstance(unit, float):
        return difference(value, expected) / unit
    if value.shape != expected.shape:
        return float("inf")
    return difference((value - expected) / unit, torch.zeros_like(expected))
