"""Find the functions with which a model's code computes values for each head, such as ALiBi's biases: `find_functions`."""

import copy
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn

from titanplans.derive.counts import ERRORS, SlicedRegion
from titanplans.derive.probe import ARGUMENT, float_argument_names
from titanplans.derive.region import RecordedRegion, record_calls, return_constant, walk_float_arguments
from titanplans.derive.sections import local_rows
from titanplans.split.decoder import join, within
from titanplans.split.local_code import HeadRanks, heads_of_result, methods, set_functions

_RANKS = 2


def called_functions(cls: type[nn.Module]) -> dict[str, Any]:
    """Return the functions that the code of a class calls by a global name of its file, by this name."""
    found: dict[str, Any] = {}
    for method in methods(cls).values():
        code = inspect.unwrap(method)
        called = {name: code.__globals__.get(name) for name in code.__code__.co_names}
        found |= {name: function for name, function in called.items() if isinstance(function, FunctionType)}
    return found


def split_arguments(split: SlicedRegion) -> list[str]:
    """Return the names of a region's arguments that are split: each unit uses another slice."""
    sharded = [name for name in float_argument_names(split.findings.region) if name in split.layout.sharded]
    return [name.removeprefix(ARGUMENT).rpartition(" ")[0] for name in sharded]


def find_functions(
    model: nn.Module,
    blocks: Iterable[str],
    regions: Mapping[str, SlicedRegion],
    runs: Iterable[Callable[[nn.Module], Any]],
) -> dict[str, int]:
    """Return the functions whose results have a row for each head, by the name under which a module's code calls them.

    If they return only a rank's heads, regions get their slices of the arguments that are split, and no other argument
    changes. This is tried with every function that the code outside of blocks calls.

    Args:
        model: the unsplit model.
        blocks: the names of its blocks.
        regions: the regions that have split arguments, by the region's name in the model.
        runs: call the model with different batches, which its code may treat differently.

    Returns:
        The number of heads by "module.function"; {} if the arguments of any run are not split by such functions.
    """
    outside = {
        name: module
        for name, module in model.named_modules()
        if not any(name == block or within(name, block) for block in blocks)
    }
    functions = {
        join(name, called): inspect.unwrap(function).__code__
        for name, module in outside.items()
        for called, function in called_functions(type(module)).items()
    }
    found: dict[str, int] = {}
    for run in runs:
        try:
            arguments = _Arguments(model, regions, run)
        except ERRORS:
            continue  # the model can't be called with this batch
        by_head = {
            name: heads
            for heads in dict.fromkeys(split.units for split in regions.values())
            for name, code in functions.items()
            if code in arguments.codes and arguments.are_split({name: heads}) is not None
        }
        if not arguments.are_split(by_head):
            return {}
        found |= by_head
    return found


class _Arguments:
    """The arguments that regions get in one run of a model.

    Args:
        model, regions: as in `find_functions`.
        run: calls the model.

    Attributes:
        codes: the code of the functions that are called.
    """

    def __init__(
        self, model: nn.Module, regions: Mapping[str, SlicedRegion], run: Callable[[nn.Module], Any]
    ):
        self._model, self._regions, self._run = copy.deepcopy(model), regions, run
        self.codes: set[CodeType] = set()
        before = sys.getprofile()
        sys.setprofile(lambda frame, event, _: self.codes.add(frame.f_code) if event == "call" else None)
        try:
            calls = record_calls(self._model, lambda: run(self._model))
        finally:
            sys.setprofile(before)
        self._unsplit = {name: self._of_region(name, calls) for name in regions}
        # Unsplit regions do not run with the arguments of a rank, so they return their recorded outputs.
        for name in regions:
            return_constant(self._model.get_submodule(name), calls[name].output)

    def are_split(self, functions: Mapping[str, int]) -> bool | None:
        """Return whether every argument that has to be split is split, if `functions` return only a rank's heads.

        Args:
            functions: the number of heads by the name of the function.

        Returns:
            None if no argument is split, or if an argument changes in any other way.
        """
        all_are_split, any_is_split = True, False
        for rank in range(_RANKS):
            try:
                local = self._on_rank(rank, functions)
            except (*ERRORS, AttributeError):  # the function returns no tensor with a row for each head
                return None
            for name, split in self._regions.items():
                for (argument, x), (_, unsplit) in zip(local[name], self._unsplit[name], strict=True):
                    expected = _slice_of_rank(split, argument, unsplit, rank)
                    if expected is not None and _is_equal(x, expected):
                        any_is_split = True
                    elif _is_equal(x, unsplit):
                        all_are_split &= expected is None
                    else:
                        return None
        return all_are_split if any_is_split else None

    def _on_rank(self, rank: int, functions: Mapping[str, int]) -> dict[str, list[tuple[str, torch.Tensor]]]:
        model = copy.deepcopy(self._model)
        group: Any = (None, _RANKS)  # the functions do not communicate
        ranks = HeadRanks(rank, _RANKS, group, None, tuple(range(_RANKS)))
        by_module: dict[str, dict[str, Any]] = {}
        for name, heads in functions.items():
            owner, _, function = name.rpartition(".")
            by_module.setdefault(owner, {})[function] = heads_of_result(heads)
        for owner, local in by_module.items():
            set_functions(model.get_submodule(owner), local, ranks)
        calls = record_calls(model, lambda: self._run(model))
        return {name: self._of_region(name, calls) for name in self._regions}

    def _of_region(self, name: str, calls: Mapping[str, Any]) -> list[tuple[str, torch.Tensor]]:
        region: RecordedRegion = self._regions[name].findings.region
        return list(walk_float_arguments(replace(region, call=calls[name])))


def _slice_of_rank(split: SlicedRegion, argument: str, x: torch.Tensor, rank: int) -> torch.Tensor | None:
    """Return the rows of an argument that a rank uses; None if it uses all of them."""
    names = float_argument_names(split.findings.region)
    # Without the position, since a call with another batch may have further arguments, such as a mask.
    name = next(
        (
            name
            for name in names
            if name.startswith(f"{ARGUMENT}{argument} ") and name in split.layout.sharded
        ),
        None,
    )
    if name is None:
        return None
    dim, sections = split.layout.sharded[name]
    rows = local_rows(sections, rank, _RANKS)
    return x.index_select(dim, torch.tensor(rows)) if max(rows) < x.shape[dim] else None


def _is_equal(x: torch.Tensor, other: torch.Tensor) -> bool:
    return x.shape == other.shape and torch.equal(x, other)
