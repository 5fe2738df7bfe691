"""Shorten a derived class: make it a subclass of the registered plan from which it differs least. Start at `shorten`."""

import ast
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from titanplans.derive.write import Source
from titanplans.errors import PlanError
from titanplans.plan.degrees import Degrees
from titanplans.plan.options import TPOptions
from titanplans.plan.plan import TPPlan
from titanplans.plan.registry import registered_plans
from titanplans.split.decoder import find_decoder

_DEGREES = (Degrees(tp=2, dp_shard=1), Degrees(tp=4, dp_shard=1), Degrees(tp=2, ep=2, dp_shard=1))
"""Degrees at which two plans are compared."""

_NOT_COMPARED = re.compile(r"(input_name|float8_input|interleaved)=[^,)]*(, )?")
"""Arguments of styles that may differ although the plans are equivalent; the shortened class is proved afterwards."""


def shorten(source: Source, plan: type[TPPlan], model: nn.Module, exclude: Iterable[str] = ()) -> Source:
    """Return the source as a subclass of the registered plan that leaves the fewest lines to write.

    Args:
        source: the source of a class whose base is TPPlan.
        plan: that class.
        model: the model that it splits.
        exclude: model types whose registered plans can't be the base, also if other types have the same plan.
    """
    own = _results(plan, model)
    best = source
    registered = registered_plans()
    excluded = {registered[model_type] for model_type in exclude if model_type in registered}
    candidates = {cls for cls in registered.values() if _is_importable(cls)} - excluded
    bases = sorted(candidates, key=lambda cls: (len(cls.__mro__), cls.__module__, cls.__name__))
    for base in [TPPlan, *bases]:
        try:
            inherited = _results(base, model)
        except _ERRORS:
            inherited = {}  # the base does not fit this model, but the class may override the methods that do not fit
        kept = {
            method: lines
            for method, lines in source.methods.items()
            if method not in own or own[method] != inherited.get(method)
        }
        shorter = replace(source, base=base, methods=kept, attributes=_needed(source, base))
        if _cost(shorter) >= _cost(best):
            continue
        try:
            is_same = _results(shorter.execute(), model) == own
        except _ERRORS:
            continue
        best = shorter if is_same else best
    return best


def _is_importable(cls: type[TPPlan]) -> bool:
    """Return whether a file can import the class; classes of a script or inside a function can't be imported."""
    module = sys.modules.get(cls.__module__)
    return cls.__module__ != "__main__" and getattr(module, cls.__name__, None) is cls


_ERRORS = (PlanError, NotImplementedError, AttributeError, KeyError, TypeError, ValueError, IndexError)
"""What the methods of a plan may raise for modules that they were not written for."""


def _cost(source: Source) -> int:
    """Return the number of lines to write, plus the base's ancestors, so that of similar bases the simplest is taken."""
    return len(source.attributes) + sum(map(len, source.methods.values())) + len(source.base.__mro__)


def _needed(source: Source, base: type[TPPlan]) -> list[str]:
    """Return the lines of class attributes whose value the base does not have."""
    lines = []
    for line in source.attributes:
        name, _, value = line.partition(" = ")
        if ast.literal_eval(value) != getattr(base, name):
            lines.append(line)
    return lines


def _results(plan: type[TPPlan], model: nn.Module) -> Mapping[str, Any]:
    """Return what each method of a plan returns for the modules of `model`, in a form that can be compared."""
    decoder = find_decoder(model)
    blocks = [block.module for block in decoder.blocks]
    modules: dict[str, list[nn.Module]] = {
        "model_plan": [model],
        "layer_plan": blocks,
        "attn_plan": list(decoder.mixers.values()),
        "mlp_plan": list(decoder.mlps.values()),
        "local_attributes": list(decoder.mixers.values()),
        "mlp_attributes": list(decoder.mlps.values()),
        "model_functions": [model],
        "local_functions": list(decoder.mixers.values()),
        "heads": list(decoder.mixers.values()),
    }
    results: dict[str, Any] = {}
    for degrees in _DEGREES:
        instance = plan(TPOptions(degrees))
        for method, arguments in modules.items():
            call: Callable[[nn.Module], Mapping[str, Any]] = getattr(instance, method)
            results[method] = (*results.get(method, ()), *(_comparable(call(module)) for module in arguments))
    return results


def _comparable(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    return sorted((key, _NOT_COMPARED.sub("", repr(value))) for key, value in result.items())
