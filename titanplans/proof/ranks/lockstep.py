"""Collectives of ranks that are threads, which run in turns; ranks that call different collectives are detected."""

from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar

import torch

T = TypeVar("T")
_END = "the end of its work"


class RanksDiverged(RuntimeError):
    """The ranks called different collectives, or one on tensors that don't match."""


class RankStopped(BaseException):
    """Ends a rank's work because another rank's has failed. Not an `Exception`, so that models let it pass."""


class Lockstep:
    """Where the ranks meet at a collective, and hand the turn to the next.

    Args:
        ranks: their number.
        replica: their replica in the world, 0 or 1.
        generators: those that each rank has a state of its own of, as in a process.
    """

    def __init__(self, ranks: int, replica: int, *, generators: Sequence[torch.Generator] = ()):
        self.ranks, self.generators = ranks, generators
        self.in_world = list(range(replica * ranks, (replica + 1) * ranks))
        """The ranks' numbers in the world."""
        self.asked: dict[str, None] = {}
        """Python modules, other than torch's and ours, that called `dist.get_rank()`."""
        # An item is a rank's turn. Semaphores would do, but threading's are written in Python.
        self._turns: list[SimpleQueue[None]] = [SimpleQueue() for _ in range(ranks)]
        self._turns[0].put(None)
        self._all = tuple(range(ranks))
        self._waiting: dict[int, _Brought] = {}
        self._outcomes: dict[int, _Outcome] = {}
        """Of the collective that each rank waits for, once it has run."""
        self._depths = [0] * ranks
        self._failure: BaseException | None = None
        self._stopped = False

    def __call__(
        self,
        rank: int,
        what: tuple,
        value: Any,
        act: Callable[[list], Any],
        ranks: tuple[int, ...] | None = None,
    ) -> Any:
        """Wait for the other `ranks`, all unless given, and return `act` of the values of each, in that order.

        All ranks fail if `what` differs among those that meet, or if every rank waits for another.
        """
        outcome = self._arrive(rank, _Brought(self._all if ranks is None else ranks, what, value, act))
        if self._failure is not None:
            raise RankStopped
        return outcome.result

    def together(self, rank: int, work: Callable[[], T]) -> T:
        """Return the result of `work` on this rank, or raise on every rank the error of the first to fail."""
        self._depths[rank] += 1
        result = None
        try:
            result = work()
        except RankStopped:
            if self._stopped:
                raise
        except BaseException as error:  # noqa: BLE001 -- raised again below, on every rank
            self._failure = self._failure or error
        finally:
            self._depths[rank] -= 1
        if (failure := self._end(rank, self._depths[rank])) is not None:
            raise failure
        return result  # type: ignore[return-value]

    def wait(self, rank: int) -> None:
        """Wait for this rank's turn."""
        self._turns[rank].get()
        if self._stopped:
            raise RankStopped

    def hand_over(self, rank: int) -> None:
        """Give the turn to the next rank that waits at no collective."""
        following = ((rank + n) % self.ranks for n in range(1, self.ranks + 1))
        self._turns[next(r for r in following if r not in self._waiting)].put(None)

    def stop(self) -> None:
        """Raise RankStopped in every rank at its next collective."""
        self._stopped = True
        for turn in self._turns:
            turn.put(None)

    def _end(self, rank: int, depth: int) -> BaseException | None:
        """Wait until every rank has ended its work; return the failure of any."""
        while True:
            outcome = self._arrive(rank, _Brought(self._all, (_END, depth), None, lambda values: None))
            if outcome.ended:
                return outcome.result
            if outcome.shallowest is not None and outcome.shallowest < depth:
                raise RankStopped  # the others have left this `together`

    def _arrive(self, rank: int, brought: "_Brought") -> "_Outcome":
        self._waiting[rank] = brought
        here = [r for r in brought.ranks if r in self._waiting and self._waiting[r].ranks == brought.ranks]
        if len(here) == len(brought.ranks):
            self._settle(brought.ranks)
        elif len(self._waiting) == self.ranks:
            self._settle(self._all)  # a deadlock
        # The ranks share the process's generators: restore this one's states when its turn comes.
        states = [generator.get_state() for generator in self.generators]
        self.hand_over(rank)
        self.wait(rank)
        for generator, state in zip(self.generators, states, strict=True):
            generator.set_state(state)
        return self._outcomes.pop(rank, _Outcome())

    def _settle(self, ranks: tuple[int, ...]) -> None:
        """Run the collective of `ranks`, and release them, or all if it has failed. Called by the last to arrive."""
        came = [self._waiting[rank] for rank in ranks]
        whats = [one.what for one in came]
        ends = [what[1] for what in whats if what[0] == _END]
        same = all(one[:2] == came[0][:2] for one in came)
        outcome = _Outcome(shallowest=min(ends) if len(ends) == self.ranks else None)
        if same and ends:
            outcome = outcome._replace(result=self._failure, ended=True)
            self._failure = None
        elif self._failure is None and not same:
            self._failure = RanksDiverged(
                "the ranks called different collectives: "
                + "; ".join(f"rank {rank} {_words(what)}" for rank, what in zip(ranks, whats, strict=True))
            )
        elif self._failure is None:
            try:
                with torch.no_grad():
                    outcome = outcome._replace(result=came[0].act([one.value for one in came]))
            except RuntimeError as error:  # of torch: tensors that the collective can't take
                self._failure = RanksDiverged(f"{_words(whats[0])}: {error}")
        for rank in ranks if self._failure is None else list(self._waiting):
            del self._waiting[rank]
            self._outcomes[rank] = outcome


class _Brought(NamedTuple):
    """What a rank brings to a collective."""

    ranks: tuple[int, ...]
    """The group of the collective."""
    what: tuple
    value: Any
    act: Callable[[list], Any]


class _Outcome(NamedTuple):
    """What a collective gave its ranks."""

    result: Any = None
    ended: bool = False
    """All ranks have ended the same `together`."""
    shallowest: int | None = None
    """The least depth, if every rank has ended a `together`, of whatever depth."""


def _words(what: tuple) -> str:
    name, *rest = what
    if name == _END:
        return name
    # Settings by name, and tensors' shapes and dtypes.
    pairs = (f"{one} = {two}" if isinstance(one, str) else f"{tuple(one)} {two}" for one, two in rest)
    return ", ".join((name, *pairs))
