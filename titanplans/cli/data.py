"""`titanplans data JOB`: print the first sequences of a job's training data, and count tokens and padding."""

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

from titanplans.config import ConfigError, load_job
from titanplans.config.values import PositiveInt, from_text
from titanplans.text import columns, counted, fitted, format_bytes

if TYPE_CHECKING:
    from titanplans.training.data.batches import StepBatch
    from titanplans.training.data.loader import TextDataLoader

_SECONDS = 2.0
_FEWEST = 64
"""Sequences are counted for `_SECONDS`, and at least `_FEWEST` of them, unless each source is exhausted before."""
_MASKED, _END = "\x1b[2;33m", "\x1b[0m"


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options. All other arguments are arguments of the job."""
    parser = argparse.ArgumentParser(
        prog="titanplans data",
        usage="titanplans data JOB.toml [--sequences 3] [--section.key value ...]\n       titanplans data --clean",
        description="Print the first training sequences of a job as its model will see them, with one line per document. "
        "Tokens that do not count in the loss have another colour, or are in [[ ]]. Then print the number of sequences and "
        "tokens from each source, the padding, and the tokens per second of one process on this machine.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--sequences", default="3", metavar="N", help="number of sequences to print; default: 3"
    )
    # The former name of --sequences; the error names the new option.
    parser.add_argument("--rows", help=argparse.SUPPRESS)
    parser.add_argument(
        "--clean",
        action="store_true",
        help="remove the copies of .jsonl and .parquet files in the cache of the datasets library",
    )
    return parser


def main(argv: list[str]) -> int:
    """Run the command with these arguments and return the exit status.

    Raises:
        UserError: an argument, the job or its data can't be used.
    """
    options, job_arguments = parser().parse_known_args(argv)
    if options.rows is not None:
        raise ConfigError(f"--rows {options.rows}: this option is now called --sequences")
    if options.clean:
        folder, size = _copies()
        shutil.rmtree(folder, ignore_errors=not folder.exists())
        print(f"removed {folder}: {format_bytes(size)}")
    else:
        count = from_text(options.sequences, PositiveInt, "--sequences")
        _show(load_job(job_arguments, "data"), count)
    return 0


def _copies() -> tuple[Path, int]:
    """Return the folder with the copies of corpora in the cache of datasets, and its size in bytes."""
    from titanplans.training.data.corpus.rows import cache_folder

    return cache_folder(), sum(file.stat().st_size for file in cache_folder().rglob("*") if file.is_file())


def _show(job: Any, count: int) -> None:
    from titanplans.training.trainer.device import prepare_device

    prepare_device()
    from titanplans.training.job import resolve
    from titanplans.training.job.checks import check_data
    from titanplans.training.job.loaders import open_training_data
    from titanplans.training.job.repositories import with_commits
    from titanplans.training.trainer import documents

    job = with_commits(job, resumes=job.checkpoint.enable)
    config = resolve.hf_config(job)
    _, notes = check_data(job)
    documents.check_documents(job, config)
    documents_apart = documents.are_apart(job, documents.document_keyword(job, config))
    loader, tokenizer = open_training_data(
        job, resolve.fewest_processes(job), documents_apart=documents_apart, as_single_rank=True
    )
    sources = resolve.training_data(job).sources
    names = [source.title for source in sources]
    sequences: list[tuple[StepBatch, int]] = []  # a batch, and the index of the sequence in it
    start = time.perf_counter()
    for batch in loader.steps():
        sequences += [(batch, index) for index in range(len(batch.lengths))]
        is_enough = len(sequences) >= _FEWEST and time.perf_counter() - start >= _SECONDS
        if len(sequences) >= count and (is_enough or _all_read(loader)):
            break
    seconds = time.perf_counter() - start
    for number, (batch, index) in enumerate(sequences[:count], 1):
        has_answers = sources[batch.lengths[index][0]].chat.enable
        print(
            "\n".join(_sequence_lines(tokenizer, batch, index, f"sequence {number}", names, has_answers)),
            end="\n\n",
        )
    epochs = [text for _, text in loader.epochs_read().values()]
    extent = "every source was read to its end" if _all_read(loader) else "a sample"
    print(
        "\n".join(
            [
                *map(fitted, notes),
                f"{extent}, {counted(len(sequences), 'sequence')}:",
                *_table(sequences, names, epochs, documents_apart, seconds),
            ]
        )
    )
    if size := _copies()[1]:
        print(f"copies of corpora in the cache: {format_bytes(size)}, which titanplans data --clean removes")


def _all_read(loader: "TextDataLoader") -> bool:
    """Return whether each source was read to its end at least once."""
    return all(epochs >= 1 for epochs, _ in loader.epochs_read().values())


def _sequence_lines(
    tokenizer: Any, batch: "StepBatch", index: int, title: str, names: list[str], has_answers: bool
) -> list[str]:
    """Return a line for each document of a sequence; conversations have a second line, with each answer's last token."""
    tokens, labels, positions = (
        each[index].tolist() for each in (batch.tokens, batch.labels, batch.positions)
    )
    source, length = batch.lengths[index]
    starts = [i for i in range(length) if i == 0 or positions[i] == 0]  # positions restart with each document
    padding = f", {counted(len(tokens) - length, 'token')} of padding" if len(tokens) > length else ""
    lines = [f"{title}: {names[source]}, {counted(len(starts), 'document')}, {length} tokens{padding}"]
    for number, (first, last) in enumerate(itertools.pairwise([*starts, length]), 1):
        # A token counts in the loss if it is the label of its predecessor. The last label is not among the tokens.
        shown = tokens[first:last] + [label for label in labels[last - 1 : last] if label >= 0]
        counts = [
            False,
            *(label == token for label, token in zip(labels[first:last], shown[1:], strict=False)),
        ]
        text = "".join(
            _shown(tokenizer.decode(shown[begin:end], skip_special_tokens=False), counts[begin])
            for begin, end in _runs(counts)
        )
        lines.append(f"{number:>4} | {text}")
        if has_answers:
            ends = [end for begin, end in _runs(counts) if counts[begin]]
            last = ", ".join(
                repr(tokenizer.decode([shown[end - 1]], skip_special_tokens=False)) for end in ends
            )
            lines.append(f"     | answers end in {last or 'nothing'}")
    return lines


def _runs(values: list[bool]) -> Iterator[tuple[int, int]]:
    """Yield the start and the end of each run of equal values."""
    edges = [i for i in range(1, len(values)) if values[i] != values[i - 1]]
    return itertools.pairwise([0, *edges, len(values)])


def _shown(text: str, counts: bool) -> str:
    text = text.replace("\n", "\\n")
    if counts:
        return text
    colours = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    return f"{_MASKED}{text}{_END}" if colours else f"[[{text}]]"


def _table(
    sequences: list[tuple["StepBatch", int]], names: list[str], epochs: list[str], apart: bool, seconds: float
) -> list[str]:
    """Return a table of the sequences by source, and a line about padding and speed."""
    tokens, count, documents = Counter[int](), Counter[int](), Counter[int]()
    tokens_and_padding = sum(batch.tokens.shape[1] for batch, _ in sequences)
    for batch, index in sequences:
        source, length = batch.lengths[index]
        tokens[source] += length
        count[source] += 1
        documents[source] += int((batch.positions[index, :length] == 0).sum())
    table = [("source", "sequences", "tokens", "documents per sequence", "read")]
    for source, name in enumerate(names):
        percent = f"{100 * count[source] / len(sequences):.1f}%"
        each = f"{documents[source] / max(count[source], 1):.1f}"
        table.append((name, percent, f"{tokens[source]:,}", each, epochs[source]))
    long = sum(sum(batch.long) for batch in {id(batch): batch for batch, _ in sequences}.values())
    longer = f", {counted(long, 'document')} longer than a sequence" if long else ""
    return [
        *columns(table),
        f"documents {'apart' if apart else 'joined'}; padding {100 * (1 - tokens.total() / tokens_and_padding):.1f}% of "
        f"{len(sequences)} sequences{longer}; {tokens_and_padding / seconds:,.0f} tokens/s in this process",
    ]
