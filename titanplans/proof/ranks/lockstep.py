"""Collectives between ranks that are threads and run one at a time. Start at `Lockstep`."""

from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar

import torch

T = TypeVar("T")
_END = "the end of its work"


class RanksDiverged(RuntimeError):
    """The ranks called different collectives, or the same collective on tensors that don't match."""


class RankStopped(BaseException):
    """Raised in a rank to end its work, because another rank failed."""

    # Not an `Exception`, so that a model's own `except Exception` does not catch it.


class Lockstep:
    """Runs one rank at a time, from one collective to the next, and detects ranks that call different collectives.

    Args:
        ranks: number of ranks.
        replica: index of their data-parallel replica in the world, 0 or 1.
        generators: random generators whose state is kept per rank, as it would be with one process per rank.
    """

    def __init__(self, ranks: int, replica: int, *, generators: Sequence[torch.Generator] = ()):
        self.ranks, self.generators = ranks, generators
        self.global_ranks = list(range(replica * ranks, (replica + 1) * ranks))
        """The ranks' global ranks, in the order of the mesh."""
        self.rank_queries: dict[str, None] = {}
        """Python modules, other than torch's and ours, that called `dist.get_rank()`; the values are unused."""
        # A rank runs when it gets an item from its queue. A semaphore of `threading` would work, too, but is slow Python
        # code.
        self._turns: list[SimpleQueue[None]] = [SimpleQueue() for _ in range(ranks)]
        self._turns[0].put(None)
        self._all = tuple(range(ranks))
        self._waiting: dict[int, _Arrival] = {}
        self._outcomes: dict[int, _Outcome] = {}
        """By rank, the outcome of the collective that the rank waits for; set when the collective has run."""
        self._depths = [0] * ranks
        """By rank, the number of nested calls of `together` that the rank is in."""
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
        """Wait for the other `ranks` (default: all), and return `act(values)`, with the ranks' values in the order of
        `ranks`.

        `act` runs once, on the last rank to arrive. `what` has the name and the settings of the collective. All ranks fail
        if `what` differs between the ranks, or if all ranks wait and no collective is complete (a deadlock).
        """
        outcome = self._arrive(rank, _Arrival(self._all if ranks is None else ranks, what, value, act))
        if self._failure is not None:
            raise RankStopped
        return outcome.result

    def together(self, rank: int, work: Callable[[], T]) -> T:
        """Return the result of `work` on this rank. If a rank fails, raise the first rank's error on every rank."""
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
        """Give the turn to the next rank, in rank order, that does not wait at a collective."""
        following = ((rank + n) % self.ranks for n in range(1, self.ranks + 1))
        self._turns[next(r for r in following if r not in self._waiting)].put(None)

    def stop(self) -> None:
        """Raise RankStopped in every rank at its next collective."""
        self._stopped = True
        for turn in self._turns:
            turn.put(None)

    def _end(self, rank: int, depth: int) -> BaseException | None:
        """Wait until every rank has ended the `together` of this depth; return the failure, if any rank failed."""
        while True:
            outcome = self._arrive(rank, _Arrival(self._all, (_END, depth), None, lambda values: None))
            if outcome.has_ended:
                return outcome.result
            if outcome.shallowest is not None and outcome.shallowest < depth:
                raise RankStopped  # the other ranks have left this call of `together`

    def _arrive(self, rank: int, arrival: "_Arrival") -> "_Outcome":
        self._waiting[rank] = arrival
        present = [r for r in arrival.ranks if r in self._waiting and self._waiting[r].ranks == arrival.ranks]
        if len(present) == len(arrival.ranks):
            self._run_collective(arrival.ranks)
        elif len(self._waiting) == self.ranks:
            self._run_collective(self._all)  # a deadlock, reported as different collectives
        # The ranks share the process's generators, so each restores its own state when its turn comes.
        states = [generator.get_state() for generator in self.generators]
        self.hand_over(rank)
        self.wait(rank)
        for generator, state in zip(self.generators, states, strict=True):
            generator.set_state(state)
        return self._outcomes.pop(rank, _Outcome())

    def _run_collective(self, ranks: tuple[int, ...]) -> None:
        """Run the collective of `ranks`; the last rank to arrive calls this. Release these ranks; if the collective fails,
        release all ranks."""
        arrivals = [self._waiting[rank] for rank in ranks]
        whats = [arrival.what for arrival in arrivals]
        end_depths = [what[1] for what in whats if what[0] == _END]
        is_same = all(arrival[:2] == arrivals[0][:2] for arrival in arrivals)  # the group and `what`
        outcome = _Outcome(shallowest=min(end_depths) if len(end_depths) == self.ranks else None)
        if is_same and end_depths:
            outcome = outcome._replace(result=self._failure, has_ended=True)
            self._failure = None
        elif self._failure is None and not is_same:
            self._failure = RanksDiverged(
                "the ranks called different collectives: "
                + "; ".join(f"rank {rank} {_describe(what)}" for rank, what in zip(ranks, whats, strict=True))
            )
        elif self._failure is None:
            try:
                with torch.no_grad():
                    outcome = outcome._replace(
                        result=arrivals[0].act([arrival.value for arrival in arrivals])
                    )
            except RuntimeError as error:  # raised by torch: the tensors don't fit the collective
                self._failure = RanksDiverged(f"{_describe(whats[0])}: {error}")
        for rank in ranks if self._failure is None else list(self._waiting):
            del self._waiting[rank]
            self._outcomes[rank] = outcome


class _Arrival(NamedTuple):
    """One rank's call of a collective. Fields as in `Lockstep.__call__`."""

    ranks: tuple[int, ...]
    what: tuple
    value: Any
    act: Callable[[list], Any]


class _Outcome(NamedTuple):
    """The result of a collective, the same for all its ranks."""

    result: Any = None
    has_ended: bool = False
    """All ranks have ended the same `together`; `result` is the failure, or None."""
    shallowest: int | None = None
    """If every rank waits at the end of a `together`, the smallest of their depths, else None."""


def _describe(what: tuple) -> str:
    name, *pairs = what
    if name == _END:
        return name
    # A pair is (setting, value), or (shape, dtype) of a tensor.
    details = (
        f"{first} = {second}" if isinstance(first, str) else f"{tuple(first)} {second}"
        for first, second in pairs
    )
    return ", ".join((name, *details))
