"""Checks that compiled blocks ran compiled, and counts of their graphs, graph breaks and recompilations.

torch.compile falls back to eager silently or with a warning: if an environment variable disables it, an error is suppressed,
the recompilation limit is reached, or a compiled module is replaced. Three sources show it: calls of the compiled function
(`ModuleTracker`), torch's counters while a block runs, and the guard hook, which tells whether compiled code was found.
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
    limit_compilations,
    set_guard_hook,
)
from titanplans.torch_private.modules import ActivationWrapper, checkpointed, compiled_call

_EVERY_COMPILATION = 1_000_000
"""Number of compilations whose metrics torch keeps during a recording. With the default, 64, some would be dropped."""

_AT_BREAKS = ("Unsupported", "SkipFrame")
"""Types of failures that are expected at a graph break, where code that can't be traced has to run eagerly."""

_LIMIT = "Dynamo recompile limit exceeded"
_REMEDY = "replace, copy or wrap a block before it is compiled, not after; or switch compile off"


@dataclass
class Compilation:
    """The compiler's work while one module ran."""

    graphs: int = 0
    """Number of new graphs. A block may run the graphs of an earlier block that is like it."""

    cache_hits: int = 0
    """Number of frames for which earlier compiled code was found and ran. Some may have no graph."""

    recompilations: int = 0

    breaks: Counter[str] = field(default_factory=Counter)
    """Number of graph breaks by reason."""

    failures: list[str] = field(default_factory=list)
    """Reasons why frames were not compiled and ran eagerly."""

    @property
    def eager(self) -> str | None:
        """Why the block, or code in it that could have been compiled, ran eagerly; None if everything ran compiled."""
        if serious := [failure for failure in self.failures if not failure.startswith(_AT_BREAKS)]:
            return f"torch.compile gave up: {serious[0]}"
        if self.graphs or self.cache_hits:
            return None
        return (
            "torch.compile made no graph of the block: check that it is not disabled by TORCH_COMPILE_DISABLE, "
            "TORCHDYNAMO_DISABLE or a stance, and that its forward is not marked torch.compiler.disable"
        )


class CompileRecord:
    """The compiler's work by module; None: outside of the model. Made by `record_compilation`."""

    def __init__(self) -> None:
        self.by_module: dict[str | None, Compilation] = {}
        self._previous = _totals()

    def of(self, module: str | None) -> Compilation:
        """Return the entry of `module`, created if there is none."""
        return self.by_module.setdefault(module, Compilation())

    def assign(self, module: str | None) -> None:
        """Assign to `module` the work that torch has counted since the last call."""
        totals = _totals()
        if totals == self._previous:
            return
        (graphs, compiled, breaks), before = totals, self._previous
        entry = self.of(module)
        entry.graphs += graphs - before[0]
        for why, count in (breaks - before[2]).items():
            entry.breaks[_short(why)] += count
        for metrics in compiled[len(before[1]) :]:
            if metrics.fail_type is not None:
                why = str(metrics.fail_reason)
                kind = "RecompileLimitExceeded" if why.startswith(_LIMIT) else metrics.fail_type
                entry.failures.append(f"{kind}: {' '.join(why.split(chr(10))[:2])}".strip())
            # Ids of compilations are frame/count, so a first compilation ends in /0.
            elif metrics.has_guarded_code and not str(metrics.compile_id).endswith("/0"):
                entry.recompilations += 1
        self._previous = totals

    def outside(self, blocks: Iterable[str]) -> Compilation:
        """Return the graphs and cache hits outside of `blocks`. Other modules count, too, since the head may compute the
        loss."""
        inside = tuple(f"{block}." for block in blocks)
        entries = [e for name, e in self.by_module.items() if not f"{name}.".startswith(inside)]
        return Compilation(sum(e.graphs for e in entries), sum(e.cache_hits for e in entries))


@contextmanager
def record_compilation(tracker: ModuleTracker) -> Iterator[CompileRecord]:
    """Record the compiler's work in the step that `tracker` tracks."""
    limit_compilations(_EVERY_COMPILATION)
    record = CompileRecord()
    previous: Any = None

    def guards_checked(found: bool) -> bool:
        record.of(tracker.module).cache_hits += found
        return found if previous is None else previous(found)

    # Before the tracked module changes, assign to it the work that torch has counted until then.
    tracker.on_change = record.assign
    previous = set_guard_hook(guards_checked)
    try:
        yield record
    finally:
        set_guard_hook(previous)
        record.assign(tracker.module)
        limit_compilations(None)


def is_compiled(block: nn.Module) -> bool:
    """Whether `block`, or the module that activation checkpointing wrapped in it, has a compiled call."""
    inner = checkpointed(block) if isinstance(block, ActivationWrapper) else block
    return compiled_call(block) is not None or compiled_call(inner) is not None


def check_still_compiled(model: nn.Module, blocks: Iterable[str]) -> None:
    """Raise a ParallelError if one of `blocks`, which were compiled, has no compiled call any more."""
    if lost := [block for block in blocks if not is_compiled(model.get_submodule(block))]:
        raise ParallelError(f"compile: {lost[0]} was to be compiled, but has no compiled call: {_REMEDY}")


def check_compiled(
    blocks: Iterable[str], optional: Sequence[str], tracker: ModuleTracker, record: CompileRecord
) -> None:
    """Raise a ParallelError if one of `blocks`, which were compiled, ran eagerly in the recorded step.

    Blocks in `optional` need not run at all, such as those of a vision tower in a batch without images.
    """
    for name in blocks:
        why = None
        if not tracker.compiled_calls[name] and (tracker.calls[name] or name not in optional):
            why = f"its compiled form was never called: {_REMEDY}"
        elif tracker.calls[name] and (eager := record.of(name).eager) is not None:
            why = f"{eager}; or switch compile off"
        if why is not None:
            raise ParallelError(f"compile: {name} was to be compiled, but ran eagerly: {why}")


def check_outside_blocks(record: CompileRecord, components: Sequence[str], blocks: Iterable[str]) -> None:
    """Raise a ParallelError if fewer graphs ran outside of `blocks` than there are `components` (loss, optimizer).

    Each component is at least one graph. Which component a graph belongs to is not known.
    """
    outside = record.outside(blocks)
    if outside.graphs + outside.cache_hits < len(components):
        raise ParallelError(
            f"compile.components has {' and '.join(components)}, but outside the blocks {outside.graphs} graphs were made: "
            "train with the results of prepare_loss and prepare_optimizer and check that torch.compile is not disabled, or "
            "remove the components"
        )


def _totals() -> tuple[int, list[Any], Counter[str]]:
    """Return torch's number of graphs, its metrics of compilations, and its graph breaks by reason, all since the start."""
    counters = compiler_counters()
    return counters["stats"]["unique_graphs"], compilations(), Counter(counters["graph_break"])


def _short(why: str) -> str:
    """Return the reason for a graph break on one line: Dynamo's name for it, and the code."""
    name, _, rest = why.partition("\n")
    where = rest.partition("Developer debug context:")[2].strip().partition("\n")[0]
    where = re.sub(r" at 0x[0-9a-f]+", "", where)
    return f"{name}: {where}" if where else name
