"""The printed text of `verify`: a header, the report's table, the communication, the verdict; and progress."""

import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from titanplans.cli.verify.proof import Outcome
from titanplans.proof.report import training
from titanplans.proof.result import CaseResult, case_name, epsilons
from titanplans.text import counted

_CLEAR = "\r\x1b[K"


@contextmanager
def progress(subject: str, *, shown: bool) -> Iterator[Callable[..., None]]:
    """Give a function that shows words on a line of stderr that overwrites itself; nothing if stderr is no terminal.

    With `above` the words stay as a line; empty words clear the line.
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
    """Return `outcome` as text."""
    return "\n".join(
        [*_header(outcome), "", outcome.report.table(), "", *_communication(outcome), verdict(outcome)]
    )


def verdict(outcome: Outcome) -> str:
    """Return the verdict on one line."""
    cases = outcome.report.cases
    wrong = [case for case in cases if not case.passed]
    if outcome.of:
        said = f"{len(wrong)} of them WRONG" if wrong else "all of them right"
        return f"unfinished: {len(cases)} of {counted(outcome.of, 'case')}, {said}; {outcome.seconds:.1f} s"
    if wrong:
        first = f"the first at {wrong[0].name}: {_place(wrong[0])}"
        return f"WRONG: {len(wrong)} of {counted(len(cases), 'case')}, {first}; {outcome.seconds:.1f} s"
    worst = max((c for case in cases for c in case.checks if c.tolerance), key=lambda c: c.error)
    parts = [
        f"proved: {counted(len(cases), 'case')}, worst {epsilons(worst.error)} epsilons of {worst.tolerance:,.0f} allowed"
    ]
    if outcome.report.unreached:
        parts.append(f"{counted(len(outcome.report.unreached), 'condition')} not reached")
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
    so_far = f"{len(outcome.report.cases)} of {outcome.of or len(outcome.report.cases)}"
    verdict = "right" if case.passed else "WRONG"
    return f"{so_far}  {verdict}  {case_name(case.options)}; {training(case, outcome.report)}; worst {case.worst}"


def summary(found: Sequence[Mapping[str, Any]], seconds: float, missing: int) -> str:
    """Return the verdict on several subjects, each from `Outcome.to_dict`, on one line; `missing` are left to prove."""
    wrong = [one["subject"] for one in found if one["verdict"] != "proved"]
    cases = sum(len(one["report"]["cases"]) for one in found)
    if missing:
        said = f"WRONG: {', '.join(wrong)}" if wrong else "all of them proved"
        return (
            f"unfinished: {len(found)} of {counted(len(found) + missing, 'model')}, {said}; {seconds:.0f} s"
        )
    if wrong:
        return f"WRONG: {', '.join(wrong)}; {len(found)} models, {cases} cases; {seconds:.0f} s"
    unreached = sum(len(one["report"]["unreached"]) for one in found)
    return f"proved: {len(found)} models, {cases} cases; {counted(unreached, 'condition')} not reached; {seconds:.0f} s"


def _header(outcome: Outcome) -> list[str]:
    sizes = dict(outcome.sizes)
    parameters, batch, tokens = sizes.pop("parameters"), sizes.pop("batch_size"), sizes.pop("seq_len")
    words = ", ".join(f"{name.replace('_', ' ')} {_number(value)}" for name, value in sizes.items())
    return [
        outcome.subject,
        f"  {parameters:,} parameters, {words}",
        f"  {counted(batch, 'sequence')} of {counted(tokens, 'token')}, {outcome.ranks}",
        *(f"  {note}" for note in outcome.notes),
    ]


def _communication(outcome: Outcome) -> list[str]:
    """A table of collectives for each cut, with the stream sharded and whole; of further cases only needless ones."""
    lines: list[str] = []
    shown: set[tuple[bool, bool]] = set()
    for options, communication in outcome.counts:
        table = communication.lines()
        name = case_name(options)
        title = f"collectives, {name}"
        kind = options.sequence_parallel, options.degrees.cp > 1
        if kind in shown:  # the loss changes nothing but the head
            table = [line for line in table if line.startswith("more")]
            title += "" if table else ": no more than is needed"
        shown.add(kind)
        lines += [title, *(f"  {line}" for line in table), ""]
    return lines


def _place(case: CaseResult) -> str:
    """The place where a failing case goes wrong first, or else its wrong quantity."""
    finding = case.finding
    return case.worst if finding is None else f"{finding.direction}, {finding.first.name}"


def _number(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else " and ".join(map(str, value))
