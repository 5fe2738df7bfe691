"""The data loader of the trainer: batches of packed text, and a place that any number of ranks can go on from.

torchtitan's loader keeps a place for each data-parallel rank, as a pickle, and can't be resumed by another number of ranks.
"""

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
    """Batches of packed text, or conversations: `{"input", "positions"}`, labels, each `[local_batch_size, seq_len]` int64.

    `labels[t]` is the token after `input[t]`, or IGNORE_INDEX where a sequence is filled up, or what a conversation
    says doesn't count. `positions` count from the beginning of each document. All ranks of one `dp_rank` (tensor,
    context and pipeline parallel) get the same batches; those of different `dp_rank` have no sequence in common.

    The batches of all ranks for one optimizer step are, together, the same sequences for any number of ranks.

    Raises:
        DataError: the data set can't be used, or a loaded state belongs to another job.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Which text, in which order, read by whom."""

        workers: WorkerOptions = field(default_factory=WorkerOptions)
        """[training.dataloader], or that of validation."""

        data: Data
        """How documents become sequences, `documents` decided, and all `sources`."""

        infinite: bool = True
        """A mixture by weight, until the run or `epochs` are over; else one pass, of the sources one after another."""

        epochs: int | None = None
        """Passes over the data; None: as many as the run takes."""

        seed: int = 0
        """Of the order of the documents."""

        global_batch_size: int | None = None
        """Sequences in one optimizer step, over all ranks; None: one batch of each data-parallel rank."""

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
        for of in data.sources:
            chat = ChatFormat(of.chat, tokenizer.tokenizer_path, seq_len) if of.chat.enable else None
            source = open_source(of, seed=config.seed, chat=chat)
            self._sources.append(PackedSource(of.title, source, data, tokenizer, seq_len, chat))
        self._weights = {of.title: of.weight for of in data.sources}
        in_step = config.global_batch_size or local_batch_size * dp_world_size
        self._slice = BatchSlice(
            in_step // dp_world_size, dp_rank, dp_world_size, max(1, config.workers.num_workers)
        )
        readers = Readers(1)
        if config.infinite:
            readers = divide(
                lambda ns: min(source.source.choose_readers(ns) for source in self._sources), self._slice
            )
        self._position = DataPosition(readers, rest=not config.infinite)
        self._steps_of_rank = StepBatches(
            self._sources,
            seq_len,
            self._slice,
            self._position,
            weights=[*self._weights.values()] if config.infinite else None,
            epochs=config.epochs if config.infinite and data.exhausted == "repeat" else 1,
        )
        self._any_rank = AnyRank()
        self._batch_size = local_batch_size
        self._has_metrics = len(self._sources) > 1 or data.packing != "cut" or data.sources[0].chat.enable
        self._metrics = DataMetrics([source.name for source in self._sources])
        self._identity = {"tokenizer": _describe(tokenizer), "infinite": config.infinite}
        self._fingerprints: list[dict[str, str]] = []
        options = config.workers
        has_workers = options.num_workers > 0
        self._open = partial(
            DataLoader,
            self._steps_of_rank,
            batch_size=None,
            collate_fn=_as_it_is,  # pyrefly: ignore[bad-argument-type]  without a batch size it is given an item
            num_workers=options.num_workers,
            worker_init_fn=partial(end_with_rank, os.getpid()) if has_workers else None,
            persistent_workers=has_workers and options.persistent_workers,
            pin_memory=options.pin_memory,
            prefetch_factor=options.prefetch_factor if has_workers else None,
        )
        self._loader = self._open()

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        position = self._position = self._steps_of_rank.start
        return self._batches(self._steps(position, self._begin(position, self._loader)))

    def steps(self) -> Iterator[StepBatch]:
        """Yield the rank's batch of each step, from the beginning."""
        self._position = self._steps_of_rank.beginning
        for batch, after in self._steps(self._position, self._begin(self._position, self._loader)):
            self._position = after
            yield batch

    def _begin(
        self, position: DataPosition, loader: DataLoader[Any]
    ) -> Iterator[StepBatch | DataError | Exhausted]:
        self._steps_of_rank.start = position
        batches = iter(loader)  # workers have a copy of `start` now
        self._steps_of_rank.start = self._steps_of_rank.beginning
        return batches

    def _steps(
        self, position: DataPosition, batches: Iterator[StepBatch | DataError | Exhausted]
    ) -> Iterator[tuple[StepBatch, DataPosition]]:
        """Yield the batches, each with the position after its step.

        Raises:
            DataError: on all ranks, in the same step.
        """
        while (batch := next(batches, None)) is not None:
            if self._any_rank(isinstance(batch, DataError | Exhausted)):
                if errors := [found for found in gather_objects(batch) if isinstance(found, DataError)]:
                    raise errors[0]
                position = replace(merged(gather_objects(position)), rest=True)
                # Its own generator: a job that resumes from here on draws nothing for it.
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
        for batch, position in steps:
            self._metrics.count(batch)
            columns = [
                tensor.split(self._batch_size) for tensor in (batch.tokens, batch.positions, batch.labels)
            ]
            for count, (tokens, positions, labels) in enumerate(zip(*columns, strict=True), 1):
                if count == len(columns[0]):
                    self._position = position
                yield {"input": tokens, "positions": positions}, labels

    def take_metrics(self) -> dict[str, float]:
        """Return what all ranks together have read since they last asked, see docs/data.md; {} where nothing varies."""
        return self._metrics.take(self._slice.ranks) if self._has_metrics else {}

    def epochs_read(self) -> dict[str, tuple[float, str]]:
        """Return how often each source was read, by its name, as a number and in words. Collective."""
        position = merged(gather_objects(self._position))
        return {
            source.name: source.epochs_read(
                position.readers.count,
                {reader: own.sources[at] for reader, own in position.by_reader.items()},
            )
            for at, source in enumerate(self._sources)
        }

    def state_dict(self) -> dict[str, str]:
        """Return the position after the last whole step, and what it belongs to, as one JSON text. Collective.

        All ranks get the same.
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
        """Go on with the batch that followed when `state_dict` was taken, on any number of ranks and workers.

        Raises:
            DataError: as `check_state`.
        """
        if not state_dict:  # the checkpoint is another program's, and has none
            return
        self._position, notes = self.check_state(state_dict)
        self._steps_of_rank.start = self._position
        for line in notes:
            logger.info(line)

    def check_state(self, state_dict: dict[str, str]) -> tuple[DataPosition, list[str]]:
        """Return the position in the data where `load_state_dict` goes on, and what it says.

        Raises:
            DataError: it is of other data, or by other settings; or a text has changed that was read.
        """
        state = json.loads(state_dict[STATE_KEY])
        position, notes = resume(state, self._sources, self._weights, self._identity)
        if (size := state["global_batch_size"]) != self._slice.global_batch:
            notes.append(
                f"a global batch has {self._slice.global_batch} sequences now, and had {size} in the checkpoint: training "
                f"goes on with the same text, in other batches; training.global_batch_size = {size} keeps them"
            )
        return position, notes


def _as_it_is(batch: StepBatch | DataError | Exhausted) -> StepBatch | DataError | Exhausted:
    return batch


def _describe(tokenizer: HuggingFaceTokenizer) -> str:
    """The vocabulary's size, and a digest of the encoding of all tokens' text, in which another merge shows."""
    size = tokenizer.get_vocab_size()
    ids = tokenizer.encode(_PROBE + tokenizer.decode(list(range(size))), add_bos=True, add_eos=True)
    return f"{size} tokens, {hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:8]}"
