"""Find the module that a verdict names, and check that it is the right one.

The operator decides at which of four groups of modules a fault in a style shows first:

- `HERE`: a wrong value or a wrongly labelled gradient shows at the output or a parameter of the module itself. Only this
  module may be named. (If it never runs because a fused module uses its weight, the fault shows at the fused module.)
- `BEFORE`: a wrong gradient of a module's input shows at the output of the module that finished last before this module.
- `STREAM`: if the residual stream has another layout than the rest of the plan assumes, token-wise functions are still
  right. The fault shows where the two layouts meet: at the next region, or where the block adds the residual. The verdict
  may name the modules up to the end of the block (for modules before the first block: to the end of the first block), the
  modules around the faulty module, and the next module.
- all other operators: the module's output has another layout, which shows only at the modules that use the output. The
  verdict may name the faulty module, the modules inside it, the module around it, the module that finishes next, and the
  modules of the same mixer or MLP. Attention itself has no module: if k has too many heads, this shows at o.
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


def is_right(verdict: Verdict) -> bool:
    """Return whether the verdict names the right module.

    A refusal has to name the mutant's key or the key's region, a failing case has to name an allowed module.
    """
    mutant = verdict.mutant
    reference = mutant.architecture.reference()
    if verdict.refusal is None:
        assert verdict.case is not None
        return bool(named(verdict.case, reference.pristine) & allowed(mutant.operator, mutant.key, reference))
    names = re.findall(r"[\w.]+", verdict.refusal)
    return any(name == _parent(mutant.key) or _inside(name, mutant.key) for name in names)


def allowed(operator: str, key: str, reference: ReferenceRun) -> set[str]:
    """Return the modules that a correct verdict may name."""
    order = [name.partition(" ")[0] for name in reference.orders["step 1, batch 1"]]
    positions = [i for i, name in enumerate(order) if _inside(name, key)]
    region = {name for name in order if _parent(name) == _parent(key)} if _in_region(key) else set()
    if not positions:
        return {key} | region
    before, after = (
        order[positions[0] - 1] if positions[0] else "",
        order[positions[-1] + 1] if positions[-1] + 1 < len(order) else LOSS,
    )
    if operator in HERE:
        return {key}
    if operator in BEFORE:
        return {before}
    if operator in STREAM:
        blocks = find_decoder(reference.pristine).names
        block = next((name for name in blocks if _inside(key, name)), blocks[0])
        end = order.index(block) if positions[-1] <= order.index(block) else len(order)
        return {*order[positions[0] : end + 1], *_around(key), after}
    return {name for name in order if _inside(name, key)} | {_parent(key), after} | region


def named(case: CaseResult, model: nn.Module) -> set[str]:
    """Return the modules of `model` at which a failing case first differs from the unsplit model, or raises an error."""
    if case.finding is not None:
        return {_module(case.finding.first.name, model)}
    where_raised = next((check.where for check in case.checks if check.what == "runs"), None)
    if where_raised is None:
        return {_module(case.worst.partition(" ")[2], model)}
    if where_raised == "in the loss":
        return {LOSS}
    match = _RUNS.fullmatch(where_raised)
    assert match, where_raised
    module, last = match.groups()
    return {module, last} if last is not None and _inside(last, module) else {module}


def _module(point: str, model: nn.Module) -> str:
    """Return the module to which `point` of a report belongs: an output, an output's gradient, or a parameter."""
    name = point.removeprefix("gradient of the output of ").partition(" ")[0]
    return _parent(name) if name in dict(model.named_parameters(remove_duplicate=False)) else name


def _in_region(key: str) -> bool:
    return any(name in key.split(".")[:-1] for name in ("attn", "self_attn", "mlp"))


def _around(name: str) -> set[str]:
    names = name.split(".")
    return {".".join(names[:n]) for n in range(1, len(names))}


def _inside(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")


def _parent(name: str) -> str:
    return name.rpartition(".")[0]
