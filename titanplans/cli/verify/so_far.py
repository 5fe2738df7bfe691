"""The output of `verify` before its end: a row of each case on the terminal; all so far in a file, or when stopped."""

import json
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from titanplans.cli.verify.proof import Outcome
from titanplans.cli.verify.screen import row, summary, text
from titanplans.errors import VerifyError


class News(NamedTuple):
    """News of a subject: a further case, or the end. Plain data: it comes from another process."""

    at: int
    """The subject's number."""
    found: dict[str, Any]
    """The outcome as JSON."""
    text: str
    row: str
    """The newest case, on one line."""
    finished: bool


def news(at: int, outcome: Outcome) -> News:
    """Return the news of `outcome`, of the subject with the number `at`."""
    return News(at, outcome.to_dict(), text(outcome), row(outcome), not outcome.of)


class SoFar:
    """The newest outcome of each subject of a command, which rank 0 writes and prints; `show` is of `screen.progress`."""

    def __init__(self, request: Namespace, names: list[str], rank: int, show: Callable[..., None]):
        self.request, self.names, self.rank, self.show = request, names, rank, show
        self.newest: dict[int, News] = {}
        self._start = time.perf_counter()

    def heard(self, one: News) -> None:
        """Take the news, and print a finished subject."""
        self.newest[one.at] = one
        if one.finished:
            self._print(one.text + "\n" * self.request.all)
        elif not self.request.all:
            self.show(one.row, above=True)
        if self.request.all:
            done = sum(each.finished for each in self.newest.values())
            self.show(f"{done} of {len(self.names)} models; {self.names[one.at]}: {one.row}")
        self.write()

    def end(self, *, stopped: bool = False) -> None:
        """Print the end; of a stopped command the unfinished subjects, too."""
        if self.rank != 0:
            return
        if self.request.json:
            print(self._so_far(), end="")
        elif self.request.all:
            finished = [one.found for _, one in sorted(self.newest.items()) if one.finished]
            missing = len(self.names) - len(finished)
            words = summary(finished, time.perf_counter() - self._start, missing)
            self._print(words)
            self.write(f"{words}\n")
        elif stopped:
            unfinished = [one.text for one in self.newest.values() if not one.finished]
            self._print("\n".join(unfinished) or "stopped before the first case")

    def write(self, last: str = "") -> None:
        """Replace the content of the file, if one was asked for; a VerifyError if it can't be written."""
        if self.request.output is not None and self.rank == 0:
            try:
                Path(self.request.output).write_text(self._so_far() + last)
            except OSError as error:
                raise VerifyError(
                    f"--output {self.request.output}: {error.strerror}: name a file in a folder that is there"
                ) from error

    def _print(self, words: str) -> None:
        if not self.request.json:
            self.show("")
            print(words, flush=True)

    def _so_far(self) -> str:
        every = [one for _, one in sorted(self.newest.items())]
        if not self.request.json:
            return "".join(f"{one.text}\n" + "\n" * self.request.all for one in every)
        found = [one.found for one in every]
        return json.dumps({"subjects": found} if self.request.all else found[0]) + "\n" if found else ""
