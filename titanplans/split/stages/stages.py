"""Which stage of a pipeline holds what: blocks, what stands before and after them, parameters that several hold."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from torch import nn

from titanplans.errors import ParallelError
from titanplans.split.decoder import Decoder, find_decoder, is_held
from titanplans.split.stages.stage import PassedBlock, PassedModule, Stage
from titanplans.split.stages.trace import Trace, is_before
from titanplans.text import class_name


class Stages:
    """The stages into which a model is cut, each with one block or more.

    Args:
        model: the unsplit model, on any device; it is read here alone.
        trace: of a forward of it.
        starts: the number of the first block of each stage, ascending from 0.

    Raises:
        ParallelError: a router's balance, which is no sum over stages, is a part of the loss.
    """

    def __init__(self, model: nn.Module, trace: Trace, starts: Sequence[int]):
        self.decoder: Decoder = find_decoder(model)
        self.trace = trace
        self.bounds = (*starts, len(self.decoder.names))
        if (reason := balance_fault(model)) is not None:
            raise ParallelError(reason)
        self.passed = tuple(tuple(self._passed(model, *bounds)) for bounds in pairwise(self.bounds))
        """For each stage the names of the modules that others hold."""
        self.shared = dict(self._shared(model))
        """The parameters that several stages hold, by the name in `model`: of each the name in each of them."""

    def __len__(self) -> int:
        return len(self.passed)

    def whole_names(self, number: int) -> dict[str, str]:
        """Return for the parameters that the stage of this `number` shares, by their names in it, those in the model."""
        return {names[number]: whole for whole, names in self.shared.items() if number in names}

    def cut(self, model: nn.Module, number: int) -> Stage:
        """Make `model`, a copy of the unsplit one, prepared but not split, the stage of this `number`, in place."""
        received: dict = {}
        for name in self.passed[number]:
            module = model.get_submodule(name)
            if name in self.decoder.names:
                call = self.trace.calls[self.decoder.names.index(name)]
                model.set_submodule(name, PassedBlock(module, call, received))
            else:
                outside = self.trace.outside[name]
                width = None if outside.keeps_shape or name == self.decoder.head else outside.width
                model.set_submodule(name, PassedModule(module, name, width, received))
        first, last = self.bounds[number : number + 2]
        gives = () if number == len(self) - 1 else self.trace.crossing(last)
        return Stage(model, self.trace.crossing(first), gives, received)

    def _passed(self, model: nn.Module, first: int, last: int) -> Iterator[str]:
        names = self.decoder.names
        yield from (name for at, name in enumerate(names) if not first <= at < last)
        for name, call in self.trace.outside.items():
            # Nothing is computed after an inner stage's last block. The rest stays, with parameters that stages share.
            follows = call.first == len(names) and (call.keeps_shape or name == self.decoder.head)
            if (is_before(call) and first > 0) or (follows and last < len(names)):
                yield name

    def _shared(self, model: nn.Module) -> Iterator[tuple[str, Mapping[int, str]]]:
        names: dict[nn.Parameter, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names.setdefault(parameter, []).append(name)
        for known in names.values():
            held = ((at, [n for n in known if is_held(n, passed)]) for at, passed in enumerate(self.passed))
            holders = {at: here[0] for at, here in held if here}
            if len(holders) > 1:
                yield known[0], holders


def balance_fault(model: nn.Module) -> str | None:
    """Return why the routers of `model` can't be balanced by a term of its loss; None if they are not."""
    if not getattr(getattr(model, "config", None), "output_router_logits", False):
        return None
    return (
        f"output_router_logits = True: the balance of the routers of {class_name(model)} is computed of all blocks at once, "
        "which no stage of a pipeline has; set it to False, and balance by load_balance_coeff"
    )
