"""`titanplans data JOB`: the rows that a job's model will see, and how fast this machine makes them."""

import argparse
import itertools
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titanplans.config import load_job
from titanplans.config.values import PositiveInt, from_text
from titanplans.text import columns, counted, fitted, in_bytes

if TYPE_CHECKING:
    from titanplans.training.data.batches import StepBatch
    from titanplans.training.data.loader import TextDataLoader

_SECONDS = 2.0
_FEWEST = 64
"""Rows that are counted: as many as take 2 s, and at least so many; fewer if each source was read once before."""
_MASKED, _END = "\x1b[2;33m", "\x1b[0m"


def parser() -> argparse.ArgumentParser:
    """Return the parser of this command's own options."""
    parser = argparse.ArgumentParser(
        prog="titanplans data",
        usage="titanplans data JOB.toml [--rows 3] [--section.key value ...]\n       titanplans data --clean",
        description="Print the first rows of a job's training data as its model will see them, a line for each document: "
        "what does not count in the loss is in another colour, or in [[ ]]; then the percentages of sources and of padding, "
        "and the tokens a second that one process of this machine makes.",
        allow_abbrev=False,
    )
    parser.add_argument("--rows", default="3", metavar="N", help="how many rows are printed")
    parser.add_argument(
        "--clean",
        action="store_true",
        help="remove the copies of .jsonl and .parquet files that jobs keep in the cache of the datasets library",
    )
    return parser


def main(argv: list[str]) -> int:
    """Show what `argv` names; return the exit status, or raise a UserError."""
    own, words = parser().parse_known_args(argv)
    if own.clean:
        folder, size = _copies()
        shutil.rmtree(folder, ignore_errors=not folder.exists())
        print(f"removed {folder}: {in_bytes(size)}")
    else:
        number = from_text(own.rows, PositiveInt, "--rows")
        _show(load_job(words, "data"), number)
    return 0


def _copies() -> tuple[Path, int]:
    """Return the folder of the copies of corpora in the cache, and their bytes."""
    from titanplans.training.data.corpus.rows import copies

    return copies(), sum(file.stat().st_size for file in copies().rglob("*") if file.is_file())


def _show(job: Any, number: int) -> None:
    from titanplans.training.trainer.device import prepare_device

    prepare_device()
    from titanplans.training.job import resolve
    from titanplans.training.job.checks import check_data
    from titanplans.training.job.parts import open_training_data
    from titanplans.training.trainer import documents

    config = resolve.hf_config(job)
    _, notes = check_data(job)
    documents.check_documents(job, config)
    apart = documents.are_apart(job, documents.document_keyword(job, config))
    loader, tokenizer = open_training_data(
        job, resolve.fewest_processes(job), documents_apart=apart, as_single_rank=True
    )
    sources = resolve.training_data(job).sources
    names = [source.title for source in sources]
    read, found, start = [], 0, time.perf_counter()
    for batch in loader.steps():
        read.append(batch)
        found += len(batch.tokens)
        is_long = found >= _FEWEST and time.perf_counter() - start >= _SECONDS
        if found >= number and (is_long or _all_read(loader)):
            break
    seconds = time.perf_counter() - start
    rows = [(batch, row) for batch in read for row in range(len(batch.lengths))]
    for at, (batch, row) in enumerate(rows[:number]):
        has_answers = sources[batch.lengths[row][0]].chat.enable
        print("\n".join(_row(tokenizer, batch, row, f"row {at + 1}", names, has_answers)), end="\n\n")
    how_much = [how_much for _, how_much in loader.epochs_read().values()]
    what = "every source was read to its end" if _all_read(loader) else "a sample"
    print(
        "\n".join(
            [
                *map(fitted, notes),
                f"{what}, {counted(len(rows), 'row')}:",
                *_counted(rows, names, how_much, apart, seconds),
            ]
        )
    )
    if size := _copies()[1]:
        print(f"copies of corpora in the cache: {in_bytes(size)}, which titanplans data --clean removes")


def _all_read(loader: "TextDataLoader") -> bool:
    """Return whether each source was read once at least."""
    return all(epochs >= 1 for epochs, _ in loader.epochs_read().values())


def _row(
    tokenizer: Any, batch: "StepBatch", row: int, title: str, names: list[str], has_answers: bool
) -> list[str]:
    """Return a row in lines, one for each document; of conversations another with the last token of each answer."""
    tokens, labels, positions = (part[row].tolist() for part in (batch.tokens, batch.labels, batch.positions))
    source, length = batch.lengths[row]
    starts = [at for at in range(length) if at == 0 or positions[at] == 0]
    padding = f", {counted(len(tokens) - length, 'token')} of padding" if len(tokens) > length else ""
    lines = [f"{title}: {names[source]}, {counted(len(starts), 'document')}, {length} tokens{padding}"]
    for number, (first, last) in enumerate(itertools.pairwise([*starts, length]), 1):
        # A token counts where the one before it has it for a label. The last label is no input of this row.
        seen = tokens[first:last] + [label for label in labels[last - 1 : last] if label >= 0]
        counts = [
            False,
            *(label == token for label, token in zip(labels[first:last], seen[1:], strict=False)),
        ]
        text = "".join(
            _shown(tokenizer.decode(seen[begin:end], skip_special_tokens=False), counts[begin])
            for begin, end in _runs(counts)
        )
        lines.append(f"{number:>4} | {text}")
        if has_answers:
            ends = [end for begin, end in _runs(counts) if counts[begin]]
            last = ", ".join(
                repr(tokenizer.decode([seen[end - 1]], skip_special_tokens=False)) for end in ends
            )
            lines.append(f"     | answers end in {last or 'nothing'}")
    return lines


def _runs(values: list[bool]) -> Iterator[tuple[int, int]]:
    """Yield from where to where neighbours are equal."""
    edges = [at for at in range(1, len(values)) if values[at] != values[at - 1]]
    return itertools.pairwise([0, *edges, len(values)])


def _shown(text: str, counts: bool) -> str:
    text = text.replace("\n", "\\n")
    if counts:
        return text
    colours = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    return f"{_MASKED}{text}{_END}" if colours else f"[[{text}]]"


def _counted(
    rows: list[tuple["StepBatch", int]], names: list[str], how_much: list[str], apart: bool, seconds: float
) -> list[str]:
    """Return what was counted over `rows`, which hold so much of each source, in lines."""
    tokens, number, documents = Counter[int](), Counter[int](), Counter[int]()
    tokens_and_padding = sum(batch.tokens.shape[1] for batch, _ in rows)
    for batch, row in rows:
        source, length = batch.lengths[row]
        tokens[source] += length
        number[source] += 1
        documents[source] += int((batch.positions[row, :length] == 0).sum())
    table = [("source", "rows", "tokens", "documents a row", "read")]
    for source, name in enumerate(names):
        share_of = f"{100 * number[source] / len(rows):.1f}%"
        each = f"{documents[source] / max(number[source], 1):.1f}"
        table.append((name, share_of, f"{tokens[source]:,}", each, how_much[source]))
    long = sum(sum(batch.long) for batch in {id(batch): batch for batch, _ in rows}.values())
    said = f", {counted(long, 'document')} longer than a row" if long else ""
    return [
        *columns(table),
        f"documents {'apart' if apart else 'joined'}; padding {100 * (1 - tokens.total() / tokens_and_padding):.1f}% of "
        f"{len(rows)} rows{said}; {tokens_and_padding / seconds:,.0f} tokens/s in this process",
    ]
