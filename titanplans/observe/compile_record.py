"""What became of the blocks that were to be compiled: graphs, graph breaks, compilations anew, and what ran eagerly.

torch.compile gives up in silence or with a warning: switched off by an environment variable, an error that is
suppressed, the limit of recompilations, a compiled module that was replaced by another. Here it is asked from three
sides, all of which are torch's own accounts: whether the compiled call was called (`step_places`), what the
compiler says it made while the block ran, and at each later frame whether what was made was found.
"""

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from titanplans.errors import ParallelError
from titanplans.observe.step_places import Places
from titanplans.parallel.blocks import block_lists
from titanplans.tensor_parallel.decoder import find_decoder

_EVERY_COMPILATION = 1_000_000
"""How many of its compilations torch is to remember meanwhile; by itself 64."""


_BESIDE_BREAKS = ("Unsupported", "SkipFrame")
_LIMIT = "Dynamo recompile limit exceeded"


@dataclass
class Compilation:
    """What the compiler did while one block ran."""

    graphs: int = 0
    """That were made. A block that is like one before needs none of its own."""

    found: int = 0
    """Pieces of code for which something compiled before was found, and ran. Some may hold no graph."""

    missed: int = 0
    """Pieces of code for which nothing that was there fitted."""

    again: int = 0
    """Of these, how often one was compiled for them then."""

    breaks: Counter[str] = field(default_factory=Counter)
    """Reasons why graphs ended before the block did, as often as they were met while it was traced."""

    failures: list[str] = field(default_factory=list)
    """Reasons why pieces of code were not compiled and ran eagerly."""

    @property
    def eager(self) -> str | None:
        """Why the block ran eagerly, or something in it that could have been compiled; None if it did not.

        What the compiler can't trace beside a graph break is none of that.
        """
        if serious := [failure for failure in self.failures if not failure.startswith(_BESIDE_BREAKS)]:
            return f"torch.compile gave up: {serious[0]}"
        if self.missed > self.again + len(self.failures):
            return "torch.compile had no graph that fitted, and made none: the limit of recompilations was reached before"
        if not self.graphs and not self.found:
            return (
                "torch.compile made no graph of it: see that neither TORCH_COMPILE_DISABLE, TORCHDYNAMO_DISABLE nor a "
                "stance switches it off, and that its forward is not marked torch.compiler.disable"
            )
        return None


CompileRecord = dict[str | None, Compilation]
"""By the block's name; None for what stands outside of all parts."""


@contextmanager
def record_compilation(places: Places) -> Iterator[CompileRecord]:
    """Record what the compiler does in the step that `places` follows."""
    from torch._C._dynamo.eval_frame import set_guard_complete_hook
    from torch._dynamo.utils import DEFAULT_COMPILATION_METRICS_LIMIT, set_compilation_metrics_limit

    accounts = _Accounts()
    previous: Any = None

    def guards_checked(cache_hit: bool) -> bool:
        entry = accounts.of(places.part)
        entry.found += cache_hit
        entry.missed += not cache_hit
        return cache_hit if previous is None else previous(cache_hit)

    set_compilation_metrics_limit(_EVERY_COMPILATION)
    accounts.skip()
    places.changes.append(accounts.settle)
    previous = set_guard_complete_hook(guards_checked)
    try:
        yield accounts.record
    finally:
        set_guard_complete_hook(previous)
        places.changes.remove(accounts.settle)
        accounts.settle(places.part)
        set_compilation_metrics_limit(DEFAULT_COMPILATION_METRICS_LIMIT)


class _Accounts:
    """Books what torch's counters have counted since the last time on a block."""

    def __init__(self) -> None:
        self.record: CompileRecord = {}
        self._graphs = 0
        self._compilations = 0
        self._breaks: Counter[str] = Counter()

    def of(self, part: str | None) -> Compilation:
        return self.record.setdefault(part, Compilation())

    def skip(self) -> None:
        """Forget what was counted before."""
        self.settle(None)
        self.record.clear()

    def settle(self, part: str | None) -> None:
        """Book what is new on `part`."""
        from torch._dynamo.utils import counters, get_compilation_metrics

        graphs = counters["stats"]["unique_graphs"]
        breaks = Counter(counters["graph_break"])
        compilations = get_compilation_metrics()
        if len(compilations) == self._compilations and graphs == self._graphs and breaks == self._breaks:
            return
        entry = self.of(part)
        entry.graphs += graphs - self._graphs
        for reason, count in (breaks - self._breaks).items():
            entry.breaks[_short(reason)] += count
        for made in compilations[self._compilations :]:
            if made.fail_type is not None:
                reason = str(made.fail_reason)
                kind = "RecompileLimitExceeded" if reason.startswith(_LIMIT) else made.fail_type
                entry.failures.append(f"{kind}: {' '.join(reason.split(chr(10))[:2])}".strip())
            elif made.has_guarded_code and not str(made.compile_id).endswith("/0"):
                entry.again += 1
        self._graphs, self._compilations, self._breaks = graphs, len(compilations), breaks


def _short(reason: str) -> str:
    """The compiler's reason for a graph break in a line: what it is, and what stood there."""
    what, _, rest = reason.partition("\n")
    where = rest.partition("Developer debug context:")[2].strip().partition("\n")[0]
    where = re.sub(r" at 0x[0-9a-f]+", "", where)
    return f"{what}: {where}" if where else what


def check_compiled(model: nn.Module, places: Places, compilation: CompileRecord) -> None:
    """Refuse that a block of `model`, all of which were to be compiled, ran eagerly.

    A vision tower may not have run at all.

    Raises:
        ParallelError: naming the first such block, and why.
    """
    layers = find_decoder(model).names
    for name in (name for names in block_lists(model, "all") for name in names):
        why = None
        if not places.compiled_calls[name] and (places.calls[name] or name in layers):
            why = "its compiled form was never called: replace, copy or wrap a block before it is compiled, not after"
        elif places.calls[name]:
            why = compilation.get(name, Compilation()).eager
        if why is not None:
            raise ParallelError(
                f"compile: {name} was to be compiled, but ran eagerly: {why}; or switch compile off"
            )


def check_beside_blocks(compilation: CompileRecord, *, loss: bool, optimizer: bool) -> None:
    """Refuse that the loss, or the optimizer's step, was to be compiled and ran eagerly, where that is certain.

    Which of the two a graph is of is not known; each is one graph at least.

    Raises:
        ParallelError: fewer graphs ran than there are such components.
    """
    components = [name for name, asked in (("loss", loss), ("optimizer", optimizer)) if asked]
    beside = compilation.get(None, Compilation())
    if beside.graphs + beside.found < len(components):
        raise ParallelError(
            f"compile.components has {' and '.join(components)}, but beside the blocks {beside.graphs} graphs were made: "
            "what trains is not what prepare_loss or prepare_optimizer returned, or torch.compile is switched off; "
            "use that, or leave it out of components"
        )
