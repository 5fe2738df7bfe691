"""Which module a verdict names, and whether it is the right one.

A fault of a style shows in one of four places, and for each operator it is known in which:

- *here*: a wrong value or a wrongly labelled gradient shows at the module itself: at its output, or at
  its own parameter. The verdict has to name it, and nothing else will do. (A module that never runs,
  because a fused one beside it reads its weight, shows at the one that does.)
- *before*: what is wrong in the backward of a module's entry first shows at the output of the module
  that feeds it: the last one to finish before it began.
- *stream*: a residual stream laid out in another way than the rest of the plan takes it to be is right
  for whatever works token by token, and wrong where it meets the other layout: at the next region,
  or where the block adds the residual. That is the rest of the module's block, or of the first block for
  what stands before them, and the code around it; the loss for the head.
- *beside*: another kind of style makes outputs that are wrong only for who reads them: the module itself,
  one inside it, the one that holds it, the next one to finish, or one of the same mixer or MLP. Between
  those projections is code without a module, so that a head too many in k shows where all of
  attention has come out, at o.
"""

import re

from torch import nn

from tests.support.mutants import operators
from tests.support.mutants.prove import Verdict
from titanplans.proof.compare.reference import ReferenceRun
from titanplans.proof.result import CaseResult
from titanplans.split.decoder import find_decoder

HERE = {
    operator.__name__
    for operator in (
        operators.gradient_of_other_stream,
        operators.unreduced,
        operators.summed_again,
        operators.as_on_stream,
        operators.as_in_region,
        operators.as_before_stream,
        operators.shift_one,
        operators.shift_half,
        operators.other_head,
        operators.bias_on_every_rank,
        operators.bias_forgotten,
        operators.offset_by_one,
        operators.offset_by_local_rows,
        operators.untied,
    )
}
BEFORE = {operators.entry_unsummed.__name__, operators.entry_summed_again.__name__}
STREAM = {operators.on_other_stream.__name__, operators.begin_elsewhere.__name__}

LOSS = "the loss"
_RUNS = re.compile(r"in (?:the backward of )?(\S+)(?: after (\S+))?")


def right(verdict: Verdict) -> bool:
    """Whether a refusal names the key or its region, or a failing case the right module."""
    mutant = verdict.mutant
    reference = mutant.architecture.reference()
    if verdict.refusal is None:
        assert verdict.case is not None
        return bool(named(verdict.case, reference.pristine) & allowed(mutant.operator, mutant.key, reference))
    names = re.findall(r"[\w.]+", verdict.refusal)
    return any(name == _parent(mutant.key) or _inside(name, mutant.key) for name in names)


def allowed(operator: str, key: str, reference: ReferenceRun) -> set[str]:
    """Return the modules that a right verdict may name."""
    order = [name.partition(" ")[0] for name in reference.orders["step 1, batch 1"]]
    runs = [i for i, name in enumerate(order) if _inside(name, key)]
    region = {name for name in order if _parent(name) == _parent(key)} if _in_region(key) else set()
    if not runs:
        return {key} | region
    before, after = (
        order[runs[0] - 1] if runs[0] else "",
        order[runs[-1] + 1] if runs[-1] + 1 < len(order) else LOSS,
    )
    if operator in HERE:
        return {key}
    if operator in BEFORE:
        return {before}
    if operator in STREAM:
        blocks = find_decoder(reference.pristine).names
        block = next((name for name in blocks if _inside(key, name)), blocks[0])
        end = order.index(block) if runs[-1] <= order.index(block) else len(order)
        return {*order[runs[0] : end + 1], *_around(key), after}
    return {name for name in order if _inside(name, key)} | {_parent(key), after} | region


def named(case: CaseResult, model: nn.Module) -> set[str]:
    """Return the modules of `model` at which a failing case is said to go wrong first: the one found, or that broke."""
    if case.finding is not None:
        return {_module(case.finding.first.name, model)}
    broken = next((check.where for check in case.checks if check.what == "runs"), None)
    if broken is None:
        return {_module(case.worst.partition(" ")[2], model)}
    if broken == "in the loss":
        return {LOSS}
    found = _RUNS.fullmatch(broken)
    assert found, broken
    module, last = found.groups()
    return {module, last} if last is not None and _inside(last, module) else {module}


def _module(place: str, model: nn.Module) -> str:
    """Return the module of an output, of an output's gradient or of a parameter."""
    name = place.removeprefix("gradient of the output of ").partition(" ")[0]
    return _parent(name) if name in dict(model.named_parameters(remove_duplicate=False)) else name


def _in_region(key: str) -> bool:
    return any(part in key.split(".")[:-1] for part in ("attn", "self_attn", "mlp"))


def _around(name: str) -> set[str]:
    parts = name.split(".")
    return {".".join(parts[:n]) for n in range(1, len(parts))}


def _inside(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")


def _parent(name: str) -> str:
    return name.rpartition(".")[0]
