"""The split of a model into pipeline stages: `Stages` says which modules each stage has, and which parameters are shared."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from torch import nn

from titanplans.errors import ParallelError
from titanplans.split.decoder import Decoder, find_decoder, is_present
from titanplans.split.stages.stage import Stage, StandInBlock, StandInModule
from titanplans.split.stages.trace import Trace, is_before
from titanplans.text import class_name


class Stages:
    """The stages that a model is split into, each with at least one block.

    Args:
        model: the unsplit model, on any device; it is not changed.
        trace: the trace of one of its forwards.
        starts: the index of the first block of each stage, ascending from 0.

    Raises:
        ParallelError: the loss contains the load-balancing loss of routers, which is not a sum over stages.
    """

    def __init__(self, model: nn.Module, trace: Trace, starts: Sequence[int]):
        self.decoder: Decoder = find_decoder(model)
        self.trace = trace
        self.bounds = (*starts, len(self.decoder.names))
        if (reason := balance_fault(model)) is not None:
            raise ParallelError(reason)
        self.absent = tuple(tuple(self._absent_modules(model, *bounds)) for bounds in pairwise(self.bounds))
        """For each stage, the names of the modules that are on other stages only."""
        self.shared = dict(self._shared(model))
        """For each parameter that several stages hold, by its name in `model`: its name in each of these stages."""

    def __len__(self) -> int:
        return len(self.absent)

    def unsplit_names(self, index: int) -> dict[str, str]:
        """Map the names of the shared parameters in the stage `index` to their names in the unsplit model."""
        return {names[index]: name for name, names in self.shared.items() if index in names}

    def build_stage(self, model: nn.Module, index: int) -> Stage:
        """Turn `model`, a copy of the unsplit model that is prepared but not split, into the stage `index`, in place."""
        received: dict = {}
        for name in self.absent[index]:
            module = model.get_submodule(name)
            if name in self.decoder.names:
                call = self.trace.calls[self.decoder.names.index(name)]
                model.set_submodule(name, StandInBlock(module, call, received))
            else:
                outside = self.trace.outside[name]
                width = None if outside.keeps_shape or name == self.decoder.head else outside.width
                model.set_submodule(name, StandInModule(module, name, width, received))
        first, last = self.bounds[index : index + 2]
        gives = () if index == len(self) - 1 else self.trace.crossing(last)
        return Stage(model, self.trace.crossing(first), gives, received)

    def _absent_modules(self, model: nn.Module, first: int, last: int) -> Iterator[str]:
        names = self.decoder.names
        yield from (name for at, name in enumerate(names) if not first <= at < last)
        for name, call in self.trace.outside.items():
            # Only the last stage uses the results of code after the blocks. In other stages the modules of that code
            # get stand-ins. A module that is also called before the last block stays, and the stages share its
            # parameters.
            follows = call.first == len(names) and (call.keeps_shape or name == self.decoder.head)
            if (is_before(call) and first > 0) or (follows and last < len(names)):
                yield name

    def _shared(self, model: nn.Module) -> Iterator[tuple[str, Mapping[int, str]]]:
        names: dict[nn.Parameter, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names.setdefault(parameter, []).append(name)
        for all_names in names.values():
            by_stage = (
                (i, [n for n in all_names if is_present(n, absent)]) for i, absent in enumerate(self.absent)
            )
            holders = {i: stage_names[0] for i, stage_names in by_stage if stage_names}
            if len(holders) > 1:
                yield all_names[0], holders


def balance_fault(model: nn.Module) -> str | None:
    """Return why stages can't compute the load-balancing loss of the routers of `model`; None if it has none."""
    if not getattr(getattr(model, "config", None), "output_router_logits", False):
        return None
    return (
        f"output_router_logits = True: {class_name(model)} computes its load-balancing loss from the routers of all "
        "blocks, which no pipeline stage has; set it to False, and balance with load_balance_coeff"
    )
