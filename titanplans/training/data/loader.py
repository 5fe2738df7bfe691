"""`TextDataLoader`: the trainer's batches of packed text or conversations, resumable on any number of ranks."""

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader
from torchtitan.components.tokenizer import HuggingFaceTokenizer
from torchtitan.tools.logging import logger

from titanplans.config.sections.data import Data
from titanplans.config.sections.data import DataLoader as WorkerOptions
from titanplans.errors import DataError
from titanplans.split.objects import gather_objects
from titanplans.training.data.batches import AnyRank, DataMetrics, Exhausted, StepBatch, StepBatches
from titanplans.training.data.chat.chat import ChatFormat
from titanplans.training.data.checks import STATE_KEY
from titanplans.training.data.corpus.sources import open_source
from titanplans.training.data.packed_source import PackedSource
from titanplans.training.data.positions import BatchSlice, DataPosition, Readers, divide, merged
from titanplans.training.data.resume import VERSION, fingerprint, resume
from titanplans.training.launch.orphans import end_with_rank

_PROBE = "Tokenizers differ: 3.14 | naïve façade | 日本語 | \t\n  def f(x): return x**2"


class TextDataLoader:
    """Yields batches of packed text or conversations for one data-parallel rank.

    A batch is `({"input", "positions"}, labels)`, each tensor `[local_batch_size, seq_len]` int64. `labels[t]` is the token
    after `input[t]`, or `IGNORED` for padding and for tokens of a conversation that do not count. `positions` count from the
    beginning of each document. TP, CP and PP ranks of one `dp_rank` get the same batches; different `dp_rank`s share no
    sequence.

    The sequences that all ranks together read for an optimizer step do not depend on the number of ranks.

    Args:
        config: what to read and how.
        dp_world_size: the data-parallel degree.
        dp_rank: the data-parallel rank.
        tokenizer: the job's tokenizer.
        seq_len: tokens per sequence.
        local_batch_size: sequences per batch.

    Raises:
        DataError: the data can't be used, or a loaded state belongs to another job.
    """

    # torchtitan's loader is not used: it saves a pickled position for each data-parallel rank, so that a run can be resumed
    # only on the same number of ranks.

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """What is read, in which order, and by how many workers."""

        workers: WorkerOptions = field(default_factory=WorkerOptions)
        """[training.dataloader] or [validation.dataloader]."""

        data: Data
        """[data] with all `sources`; `documents` is "apart" or "joined"."""

        infinite: bool = True
        """True: mix the sources by weight, for `epochs` passes if that is set. False: read the sources once, one after
        another."""

        epochs: int | None = None
        """Passes over the data; None: unlimited."""

        seed: int = 0
        """Seed of the order of the documents."""

        global_batch_size: int | None = None
        """Sequences in one optimizer step, over all ranks; None: one local batch per data-parallel rank."""

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        tokenizer: HuggingFaceTokenizer,
        seq_len: int,
        local_batch_size: int,
    ) -> None:
        data = config.data
        self._sources: list[PackedSource] = []
        for options in data.sources:
            chat = (
                ChatFormat(options.chat, tokenizer.tokenizer_path, seq_len) if options.chat.enable else None
            )
            source = open_source(options, seed=config.seed, chat=chat)
            self._sources.append(PackedSource(options.title, source, data, tokenizer, seq_len, chat))
        self._weights = {options.title: options.weight for options in data.sources}
        global_batch_size = config.global_batch_size or local_batch_size * dp_world_size
        self._slice = BatchSlice(
            global_batch_size // dp_world_size, dp_rank, dp_world_size, max(1, config.workers.num_workers)
        )
        readers = Readers(1)
        if config.infinite:
            readers = divide(
                lambda ns: min(source.source.choose_readers(ns) for source in self._sources), self._slice
            )
        self._position = DataPosition(readers, is_sequential=not config.infinite)
        self._step_batches = StepBatches(
            self._sources,
            seq_len,
            self._slice,
            self._position,
            weights=[*self._weights.values()] if config.infinite else None,
            epochs=config.epochs if config.infinite and data.exhausted == "repeat" else 1,
        )
        self._any_rank = AnyRank()
        self._batch_size = local_batch_size
        # Without a mixture, padding or conversations the metrics would be constant.
        self._has_metrics = len(self._sources) > 1 or data.packing != "cut" or data.sources[0].chat.enable
        self._metrics = DataMetrics([source.name for source in self._sources])
        self._identity = {"tokenizer": _describe(tokenizer), "infinite": config.infinite}
        self._fingerprints: list[dict[str, str]] = []
        workers = config.workers
        has_workers = workers.num_workers > 0
        self._open = partial(
            DataLoader,
            self._step_batches,
            batch_size=None,
            # Without a batch size, collate_fn is called with a single item.
            collate_fn=_return_unchanged,  # pyrefly: ignore[bad-argument-type]
            num_workers=workers.num_workers,
            worker_init_fn=partial(end_with_rank, os.getpid()) if has_workers else None,
            persistent_workers=has_workers and workers.persistent_workers,
            pin_memory=workers.pin_memory,
            prefetch_factor=workers.prefetch_factor if has_workers else None,
        )
        self._loader = self._open()

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        position = self._position = self._step_batches.start
        return self._batches(self._steps(position, self._begin(position, self._loader)))

    def steps(self) -> Iterator[StepBatch]:
        """Yield the rank's batch of each step, from the beginning of the data."""
        self._position = self._step_batches.beginning
        for batch, position in self._steps(self._position, self._begin(self._position, self._loader)):
            self._position = position
            yield batch

    def _begin(
        self, position: DataPosition, loader: DataLoader[Any]
    ) -> Iterator[StepBatch | DataError | Exhausted]:
        """Start an iteration of `loader` at `position`; a later iteration starts at the beginning again."""
        self._step_batches.start = position
        batches = iter(loader)  # `iter` copies `start` to the workers
        self._step_batches.start = self._step_batches.beginning
        return batches

    def _steps(
        self, position: DataPosition, batches: Iterator[StepBatch | DataError | Exhausted]
    ) -> Iterator[tuple[StepBatch, DataPosition]]:
        """Yield the batch of each step with the position after it. Collective.

        Raises:
            DataError: raised on all ranks in the same step, if one rank could not read its data.
        """
        while (batch := next(batches, None)) is not None:
            if self._any_rank(isinstance(batch, DataError | Exhausted)):
                if errors := [item for item in gather_objects(batch) if isinstance(item, DataError)]:
                    raise errors[0]
                # A reader is exhausted: drop this step on all ranks, and read the remaining readers one after another.
                position = replace(merged(gather_objects(position)), is_sequential=True)
                # DataLoader draws a seed here, but a job that resumes later does not draw it. With a separate generator
                # torch's default generator has the same state in both jobs.
                batches = self._begin(position, self._open(generator=torch.Generator()))
                continue
            assert isinstance(batch, StepBatch)
            position = replace(
                position,
                sequences=position.sequences + self._slice.global_batch,
                by_reader={**position.by_reader, **batch.by_reader},
            )
            yield batch, position

    def _batches(
        self, steps: Iterator[tuple[StepBatch, DataPosition]]
    ) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        """Split the rank's batch of each step into local batches; the position changes with the last local batch of a
        step."""
        for batch, position in steps:
            self._metrics.count(batch)
            local_batches = [
                tensor.split(self._batch_size) for tensor in (batch.tokens, batch.positions, batch.labels)
            ]
            for count, (tokens, positions, labels) in enumerate(zip(*local_batches, strict=True), 1):
                if count == len(local_batches[0]):
                    self._position = position
                yield {"input": tokens, "positions": positions}, labels

    def take_metrics(self) -> dict[str, float]:
        """Return the metrics of docs/data.md since the last call, over all ranks; {} if they are constant. Collective."""
        return self._metrics.take(self._slice.ranks) if self._has_metrics else {}

    def epochs_read(self) -> dict[str, tuple[float, str]]:
        """Return by source name how often the source was read, as a number and in words. Collective."""
        position = merged(gather_objects(self._position))
        return {
            source.name: source.epochs_read(
                position.readers.count,
                {
                    reader: reader_position.sources[index]
                    for reader, reader_position in position.by_reader.items()
                },
            )
            for index, source in enumerate(self._sources)
        }

    def state_dict(self) -> dict[str, str]:
        """Return the position after the last complete step, and values that identify the data, as one JSON text.

        Collective. The result is the same on all ranks.
        """
        self._fingerprints = self._fingerprints or [
            fingerprint(source.source.files) for source in self._sources
        ]
        state = {
            "version": VERSION,
            "identity": self._identity,
            "sources": {
                source.name: {
                    "weight": self._weights[source.name],
                    "identity": source.identity,
                    "files": files,
                }
                for source, files in zip(self._sources, self._fingerprints, strict=True)
            },
            "global_batch_size": self._slice.global_batch,
            **merged(gather_objects(self._position)).to_json(),
        }
        return {STATE_KEY: json.dumps(state)}

    def load_state_dict(self, state_dict: dict[str, str]) -> None:
        """Continue with the batch that would have followed when `state_dict` was saved, on any number of ranks and workers.

        Raises:
            DataError: `check_state` refuses the state.
        """
        if not state_dict:  # a checkpoint without a position, such as another program's
            return
        self._position, notes = self.check_state(state_dict)
        self._step_batches.start = self._position
        for line in notes:
            logger.info(line)

    def check_state(self, state_dict: dict[str, str]) -> tuple[DataPosition, list[str]]:
        """Return the position that `load_state_dict` continues from, and the lines that it logs.

        Raises:
            DataError: the state belongs to other data or settings, or a text that was read has changed.
        """
        state = json.loads(state_dict[STATE_KEY])
        position, notes = resume(state, self._sources, self._weights, self._identity)
        if (size := state["global_batch_size"]) != self._slice.global_batch:
            notes.append(
                f"a global batch has {self._slice.global_batch} sequences now, and had {size} in the checkpoint: training "
                f"continues with the same text in other batches; training.global_batch_size = {size} would keep the batches"
            )
        return position, notes


def _return_unchanged(batch: StepBatch | DataError | Exhausted) -> StepBatch | DataError | Exhausted:
    return batch


def _describe(tokenizer: HuggingFaceTokenizer) -> str:
    """Return the vocabulary's size and a digest of an encoded text. The text has all tokens, so the digest depends on all
    merges."""
    size = tokenizer.get_vocab_size()
    ids = tokenizer.encode(_PROBE + tokenizer.decode(list(range(size))), add_bos=True, add_eos=True)
    return f"{size} tokens, {hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:8]}"
