"""The output of `verify`: progress, and for each subject a header, tables of cases and collectives, and a verdict."""

import json
import shutil
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from titanplans.cli.verify.proof import Outcome
from titanplans.errors import VerifyError
from titanplans.proof.report import training
from titanplans.proof.result import CaseResult, case_name, epsilons
from titanplans.text import counted, fitted

_CLEAR = "\r\x1b[K"


@contextmanager
def progress(subject: str, *, shown: bool) -> Iterator[Callable[..., None]]:
    """Yield a function that shows words on one line of stderr, in place of earlier words.

    With `above` the words stay as a separate line above; empty words clear the line. Without a terminal it does nothing.
    """
    stream = sys.stderr
    shown = shown and stream.isatty()

    def show(words: str, *, above: bool = False) -> None:
        if shown and (above or not words):
            print(f"{_CLEAR}{words}", end="\n" * above, file=stream, flush=True)
        elif shown:
            line = f"{subject}: {words} ..."[: shutil.get_terminal_size().columns - 1]
            print(f"{_CLEAR}{line}", end="", file=stream, flush=True)

    try:
        yield show
    finally:
        if shown:
            print(_CLEAR, end="", file=stream, flush=True)


def text(outcome: Outcome) -> str:
    """Return the printed text of `outcome`."""
    return "\n".join(
        [*_header(outcome), "", outcome.report.table(), "", *_communication(outcome), verdict(outcome)]
    )


def verdict(outcome: Outcome) -> str:
    """Return the verdict on one line."""
    cases = outcome.report.cases
    wrong = [case for case in cases if not case.passed]
    if outcome.total_cases:
        cases_so_far = f"{len(wrong)} of them WRONG" if wrong else "all of them right"
        return f"unfinished: {len(cases)} of {counted(outcome.total_cases, 'case')}, {cases_so_far}; {outcome.seconds:.1f} s"
    if wrong:
        first = f"the first at {wrong[0].name}: {_place(wrong[0])}"
        return f"WRONG: {len(wrong)} of {counted(len(cases), 'case')}, {first}; {outcome.seconds:.1f} s"
    exact = (case for case in cases if case.scenario.dtype == outcome.report.dtype)
    worst = max((c for case in exact for c in case.checks if c.tolerance), key=lambda c: c.error)
    parts = [
        f"proved: {counted(len(cases), 'case')}, worst {epsilons(worst.error)} epsilons of {worst.tolerance:,.0f} allowed"
    ]
    if outcome.report.uncovered:
        parts.append(f"{counted(len(outcome.report.uncovered), 'condition')} not covered")
    if outcome.report.refused:
        parts.append(f"{counted(len(outcome.report.refused), 'refusal')} above")
    if wasteful := sum(not communication.minimal for _, communication in outcome.counts):
        parts.append(
            f"more is sent than is needed with {wasteful} of {len(outcome.counts)} choices of options"
        )
    return "; ".join([*parts, f"{outcome.seconds:.1f} s"])


def row(outcome: Outcome) -> str:
    """Return the newest case on one line: the number of cases so far, its verdict and its conditions."""
    *_, case = outcome.report.cases
    so_far = f"{len(outcome.report.cases)} of {outcome.total_cases or len(outcome.report.cases)}"
    verdict = "right" if case.passed else "WRONG"
    return f"{so_far}  {verdict}  {case_name(case.options)}; {training(case, outcome.report)}; worst {case.worst}"


def summary(found: Sequence[Mapping[str, Any]], seconds: float, missing: int) -> str:
    """Return the verdict on several subjects on one line.

    Args:
        found: the results of `Outcome.to_dict`.
        seconds: the time since the command started.
        missing: the number of subjects that have not been proved.
    """
    wrong = [result["subject"] for result in found if result["verdict"] != "proved"]
    cases = sum(len(result["report"]["cases"]) for result in found)
    if missing:
        models_so_far = f"WRONG: {', '.join(wrong)}" if wrong else "all of them proved"
        return f"unfinished: {len(found)} of {counted(len(found) + missing, 'model')}, {models_so_far}; {seconds:.0f} s"
    if wrong:
        return f"WRONG: {', '.join(wrong)}; {len(found)} models, {cases} cases; {seconds:.0f} s"
    uncovered = sum(len(result["report"]["uncovered"]) for result in found)
    return f"proved: {len(found)} models, {cases} cases; {counted(uncovered, 'condition')} not covered; {seconds:.0f} s"


def _header(outcome: Outcome) -> list[str]:
    sizes = dict(outcome.sizes)
    parameters, batch, tokens = sizes.pop("parameters"), sizes.pop("batch_size"), sizes.pop("seq_len")
    words = ", ".join(f"{name.replace('_', ' ')} {_number(value)}" for name, value in sizes.items())
    return [
        outcome.subject,
        f"  {parameters:,} parameters, {words}",
        f"  {counted(batch, 'sequence')} of {counted(tokens, 'token')}, {outcome.ranks}",
        f"  plan: {outcome.plan}",
        *(f"  {note}" for note in outcome.notes),
    ]


def _communication(outcome: Outcome) -> list[str]:
    """Return a table of collectives for each combination of sequence and context parallelism.

    For further options with the same combination, list only the collectives that are not needed.
    """
    lines: list[str] = []
    shown: set[tuple[bool, bool]] = set()
    for options, communication in outcome.counts:
        table = communication.lines()
        name = case_name(options)
        title = f"collectives, {name}"
        kind = options.sequence_parallel, options.degrees.cp > 1
        if kind in shown:  # loss parallelism changes only the head
            table = [line for line in table if line.startswith("more")]
            title += "" if table else ": no more than is needed"
        shown.add(kind)
        lines += [title, *(f"  {line}" for line in table), ""]
    return lines


def _place(case: CaseResult) -> str:
    """Return the module with the first wrong tensor of a failing case; if it is not known, the wrong quantity."""
    finding = case.finding
    return case.worst if finding is None else f"{finding.direction}, {finding.first.name}"


def _number(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else " and ".join(map(str, value))


class SubjectResult(NamedTuple):
    """The result of a subject after a case, or at the end of its proof: plain data, which another process can send."""

    index: int
    """The subject's index."""
    json: dict[str, Any]
    """The outcome for JSON."""
    text: str
    row: str
    """The latest case, on one line."""
    is_finished: bool


def subject_result(index: int, outcome: Outcome) -> SubjectResult:
    """Return the result of the subject `index` from its `outcome`."""
    return SubjectResult(index, outcome.to_dict(), text(outcome), row(outcome), not outcome.total_cases)


class Results:
    """The latest result of each subject of a command, which rank 0 writes and prints. `show` is what `progress` yields."""

    def __init__(self, request: Namespace, names: list[str], rank: int, show: Callable[..., None]):
        self.request, self.names, self.rank, self.show = request, names, rank, show
        self.latest: dict[int, SubjectResult] = {}
        self._start = time.perf_counter()

    def update(self, result: SubjectResult) -> None:
        """Store the result, write the output file, and print the text of a finished subject."""
        self.latest[result.index] = result
        if result.is_finished:
            self._print(result.text + "\n" * self.request.all)
        elif not self.request.all:
            self.show(result.row, above=True)
        if self.request.all:
            done = sum(each.is_finished for each in self.latest.values())
            self.show(f"{done} of {len(self.names)} models; {self.names[result.index]}: {result.row}")
        self.write()

    def end(self, *, stopped: bool = False) -> None:
        """Print the summary or the JSON; if the command was stopped, print the unfinished subjects."""
        if self.rank != 0:
            return
        if self.request.json:
            print(self._output(), end="")
        elif self.request.all:
            finished = [result.json for _, result in sorted(self.latest.items()) if result.is_finished]
            missing = len(self.names) - len(finished)
            words = summary(finished, time.perf_counter() - self._start, missing)
            self._print(words)
            self.write(f"{words}\n")
        elif stopped:
            unfinished = [result.text for result in self.latest.values() if not result.is_finished]
            self._print("\n".join(unfinished) or "stopped before the first case")

    def write(self, last: str = "") -> None:
        """Write all results and then `last` to the file of --output, if there is one. Raises VerifyError if it can't."""
        if self.request.output is not None and self.rank == 0:
            try:
                Path(self.request.output).write_text(self._output() + last)
            except OSError as error:
                raise VerifyError(
                    f"--output {self.request.output}: {error.strerror}: name a file in an existing folder"
                ) from error

    def _print(self, words: str) -> None:
        if not self.request.json:
            self.show("")
            print("\n".join(map(fitted, words.split("\n"))), flush=True)

    def _output(self) -> str:
        results = [result for _, result in sorted(self.latest.items())]
        if not self.request.json:
            return "".join(f"{result.text}\n" + "\n" * self.request.all for result in results)
        dicts = [result.json for result in results]
        return json.dumps({"subjects": dicts} if self.request.all else dicts[0]) + "\n" if dicts else ""
