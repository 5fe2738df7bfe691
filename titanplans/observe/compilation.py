"""Blocks that were to be compiled: their graphs, graph breaks and recompilations, and code that ran eagerly.

torch.compile gives up in silence or with a warning: switched off by an environment variable, an error that is
suppressed, the limit of recompilations, a compiled module that was replaced by another. Here three of torch's own
accounts are read: whether the compiled call was called (`places`), the compiler's own count of graphs while the block
ran, and at each later frame whether compiled code was found.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from titanplans.errors import ParallelError
from titanplans.observe.tracker import ModuleTracker
from titanplans.torch_private.compile import (
    compilations,
    compiler_counters,
    remember_compilations,
    set_guard_hook,
)
from titanplans.torch_private.modules import ActivationWrapper, checkpointed, compiled_call

_EVERY_COMPILATION = 1_000_000
"""How many of its compilations torch is to remember meanwhile; by itself 64."""

_AT_BREAKS = ("Unsupported", "SkipFrame")
"""Code next to a graph break that the compiler can't trace: it has to run eagerly."""

_LIMIT = "Dynamo recompile limit exceeded"
_AFTER = "replace, copy or wrap a block before it is compiled, not after; or switch compile off"


@dataclass
class Compilation:
    """The compiler's work while one module ran."""

    graphs: int = 0
    """That were made. A block that is like one before needs none of its own."""

    found: int = 0
    """Pieces of code for which something compiled before was found, and ran. Some may hold no graph."""

    recompilations: int = 0

    breaks: Counter[str] = field(default_factory=Counter)
    """Reasons why graphs ended before the block did, as often as they were met while it was traced."""

    failures: list[str] = field(default_factory=list)
    """Reasons why pieces of code were not compiled and ran eagerly."""

    @property
    def eager(self) -> str | None:
        """Why the block ran eagerly, or something in it that could have been compiled; None if nothing did."""
        if serious := [failure for failure in self.failures if not failure.startswith(_AT_BREAKS)]:
            return f"torch.compile gave up: {serious[0]}"
        if self.graphs or self.found:
            return None
        return (
            "torch.compile made no graph of it: see that neither TORCH_COMPILE_DISABLE, TORCHDYNAMO_DISABLE nor a "
            "stance switches it off, and that its forward is not marked torch.compiler.disable"
        )


class CompileRecord:
    """The compiler's work by module, under None outside of the model; made by `record_compilation`."""

    def __init__(self) -> None:
        self.by_module: dict[str | None, Compilation] = {}
        self._booked = _counted()

    def of(self, module: str | None) -> Compilation:
        """Return the module's entry."""
        return self.by_module.setdefault(module, Compilation())

    def book(self, module: str | None) -> None:
        """Book on `module` what torch has counted since the last time."""
        counted = _counted()
        if counted == self._booked:
            return
        (graphs, compiled, breaks), before = counted, self._booked
        entry = self.of(module)
        entry.graphs += graphs - before[0]
        for why, count in (breaks - before[2]).items():
            entry.breaks[_short(why)] += count
        for made in compiled[len(before[1]) :]:
            if made.fail_type is not None:
                why = str(made.fail_reason)
                kind = "RecompileLimitExceeded" if why.startswith(_LIMIT) else made.fail_type
                entry.failures.append(f"{kind}: {' '.join(why.split(chr(10))[:2])}".strip())
            elif made.has_guarded_code and not str(made.compile_id).endswith("/0"):
                entry.recompilations += 1
        self._booked = counted

    def outside(self, blocks: Iterable[str]) -> Compilation:
        """Return the compiler's work outside of `blocks`, in the model or not: the head may compute the loss."""
        inside = tuple(f"{block}." for block in blocks)
        entries = [e for name, e in self.by_module.items() if not f"{name}.".startswith(inside)]
        return Compilation(sum(e.graphs for e in entries), sum(e.found for e in entries))


@contextmanager
def record_compilation(places: ModuleTracker) -> Iterator[CompileRecord]:
    """Record the compiler's work in the step that `places` follows."""
    remember_compilations(_EVERY_COMPILATION)
    record = CompileRecord()
    previous: Any = None

    def guards_checked(found: bool) -> bool:
        record.of(places.module).found += found
        return found if previous is None else previous(found)

    places.on_change = record.book
    previous = set_guard_hook(guards_checked)
    try:
        yield record
    finally:
        set_guard_hook(previous)
        record.book(places.module)
        remember_compilations(None)


def is_compiled(block: nn.Module) -> bool:
    """Whether `block`, or what activation checkpointing has wrapped, has a compiled call."""
    inner = checkpointed(block) if isinstance(block, ActivationWrapper) else block
    return compiled_call(block) is not None or compiled_call(inner) is not None


def check_still_compiled(model: nn.Module, blocks: Iterable[str]) -> None:
    """Raise ParallelError if one of `blocks`, all compiled, has lost its compiled call."""
    if lost := [block for block in blocks if not is_compiled(model.get_submodule(block))]:
        raise ParallelError(f"compile: {lost[0]} was to be compiled, but has no compiled call: {_AFTER}")


def check_compiled(
    blocks: Iterable[str], optional: Sequence[str], places: ModuleTracker, record: CompileRecord
) -> None:
    """Raise ParallelError if one of `blocks`, all to be compiled, ran eagerly in the recorded step.

    Those in `optional` may not run at all: a vision tower's, to which no image came.
    """
    for name in blocks:
        why = None
        if not places.compiled_calls[name] and (places.calls[name] or name not in optional):
            why = f"its compiled form was never called: {_AFTER}"
        elif places.calls[name] and (eager := record.of(name).eager) is not None:
            why = f"{eager}; or switch compile off"
        if why is not None:
            raise ParallelError(f"compile: {name} was to be compiled, but ran eagerly: {why}")


def check_outside_blocks(record: CompileRecord, components: Sequence[str], blocks: Iterable[str]) -> None:
    """Raise ParallelError if fewer graphs ran outside of `blocks` than there are `components`: the loss, the optimizer.

    Which of the two a graph is of is not known; each is one graph at least.
    """
    outside = record.outside(blocks)
    if outside.graphs + outside.found < len(components):
        raise ParallelError(
            f"compile.components has {' and '.join(components)}, but outside the blocks {outside.graphs} graphs were made: "
            "train with the results of prepare_loss and prepare_optimizer, and see that torch.compile is not switched "
            "off; or remove them from components"
        )


def _counted() -> tuple[int, list[Any], Counter[str]]:
    """The graphs, the compilations and the graph breaks that torch has counted so far."""
    counters = compiler_counters()
    return counters["stats"]["unique_graphs"], compilations(), Counter(counters["graph_break"])


def _short(why: str) -> str:
    """The compiler's reason for a graph break on one line: its name, and the code there."""
    what, _, rest = why.partition("\n")
    where = rest.partition("Developer debug context:")[2].strip().partition("\n")[0]
    where = re.sub(r" at 0x[0-9a-f]+", "", where)
    return f"{what}: {where}" if where else what
