"""Where ranks that are threads wait for each other and take turns; ranks that do different things are detected."""

from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar

import torch

T = TypeVar("T")
_END = "the end of its work"


class RanksDiverged(RuntimeError):
    """The ranks lost each other: they called different collectives, or one on tensors that don't match."""


class RankStopped(BaseException):
    """Ends a rank's work because another rank's has failed. Not an `Exception`, so that models let it pass."""


class Lockstep:
    """Where the ranks wait for each other, and hand over to the next.

    Args:
        ranks: their number.
        replica: their replica in the world, 0 or 1.
        drawing: each rank has its own state of the default generator, as it would in a process.
    """

    def __init__(self, ranks: int, replica: int, *, drawing: bool = False):
        self.ranks, self.drawing = ranks, drawing
        self.in_world = list(range(replica * ranks, (replica + 1) * ranks))
        """The ranks' numbers in the world."""
        self.asked: dict[str, None] = {}
        """Python modules, other than torch's and ours, that asked for a rank's number in the world."""
        # An item is a rank's turn. Semaphores would do, but those of threading are written in Python.
        self._turns: list[SimpleQueue[None]] = [SimpleQueue() for _ in range(ranks)]
        self._turns[0].put(None)
        self._brought: dict[int, tuple[Any, Any, Callable]] = {}
        self._depths = [0] * ranks
        self._failure: BaseException | None = None
        self._result: Any = None
        self._shallowest: int | None = None
        """Where all ranks are at the end of a `together`: the depth of the outermost."""
        self._ended = False
        self._stopped = False

    def __call__(self, rank: int, what: tuple, value: Any, act: Callable[[list], Any]) -> Any:
        """Bring `value`, wait for the other ranks, and return `act` of all values, in rank order.

        Ranks whose `what` differs have lost each other, and all fail.
        """
        self._arrive(rank, what, value, act)
        if self._failure is not None:
            raise RankStopped
        return self._result

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
        """Let the next rank run."""
        self._turns[(rank + 1) % self.ranks].put(None)

    def stop(self) -> None:
        """End every rank's work at its next collective."""
        self._stopped = True
        for turn in self._turns:
            turn.put(None)

    def _end(self, rank: int, depth: int) -> BaseException | None:
        """Wait until every rank has ended its work; return the failure of any."""
        while True:
            self._arrive(rank, (_END, depth), None, lambda values: None)
            if self._ended:
                return self._result
            if self._shallowest is not None and self._shallowest < depth:
                raise RankStopped  # the others have left this work for good

    def _arrive(self, rank: int, what: tuple, value: Any, act: Callable[[list], Any]) -> None:
        self._brought[rank] = what, value, act
        if len(self._brought) == self.ranks:
            self._settle([self._brought[r] for r in range(self.ranks)])
            self._brought.clear()
        # The process has one default generator, and each rank draws its own numbers.
        state = torch.get_rng_state() if self.drawing else None
        self.hand_over(rank)
        self.wait(rank)
        if state is not None:
            torch.set_rng_state(state)

    def _settle(self, brought: list[tuple[Any, Any, Callable]]) -> None:
        """Do the collective. Called by the last rank to arrive; all read the result before they meet again."""
        whats = [what for what, _, _ in brought]
        ends = [what[1] for what in whats if what[0] == _END]
        alike = all(what == whats[0] for what in whats)
        self._ended = alike and bool(ends)
        self._shallowest = min(ends) if len(ends) == self.ranks else None
        if self._ended:
            self._result, self._failure = self._failure, None
        elif self._failure is None and not alike:
            self._failure = RanksDiverged(
                "the ranks called different collectives: "
                + "; ".join(f"rank {rank} {_words(what)}" for rank, what in enumerate(whats))
            )
        elif self._failure is None:
            try:
                with torch.no_grad():
                    self._result = brought[0][2]([value for _, value, _ in brought])
            except RuntimeError as error:  # of torch: tensors that the collective can't take
                self._failure = RanksDiverged(f"{_words(whats[0])}: {error}")


def _words(what: tuple) -> str:
    name, *rest = what
    if name == _END:
        return name
    # Settings by name, and tensors' shapes and dtypes.
    pairs = (f"{one} = {two}" if isinstance(one, str) else f"{tuple(one)} {two}" for one, two in rest)
    return ", ".join((name, *pairs))
