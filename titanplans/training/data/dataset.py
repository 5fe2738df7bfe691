"""The windows of one data-parallel rank, as an iterable that can be stopped and resumed anywhere.

A position is three numbers: the epoch, the document, the token. No token is ever saved; resuming
tokenises the document it stopped in and goes on.

Ranks and loader workers are *shards*. There are two ways to share the windows out:

- by document: each shard reads documents of its own. The way of an endless run.
- by window: each shard reads all documents and keeps every n-th window. The way of a single pass, in
  which all ranks must end after the same number of batches, and of a corpus with fewer documents than
  shards. It costs each shard the tokenisation of the whole corpus.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.components.tokenizer import BaseTokenizer

from titanplans.errors import DataError
from titanplans.training.data.packing import Window, pack
from titanplans.training.data.sources import Source
from titanplans.training.reading import refusing

Sample = tuple[dict[str, torch.Tensor], torch.Tensor]
"""`{"input": [seq_len], "positions": [seq_len]}`, labels `[seq_len]`, all int64."""


@dataclass(frozen=True)
class Cursor:
    """Where the next window begins."""

    epoch: int = 0
    document: Any = None
    """The source's own position; None is the epoch's first document."""
    offset: int = 0
    window: int = 0
    """The number of the next window, among all those of the run that this shard has passed."""


@dataclass(frozen=True)
class Layout:
    """How many there are of what, on all ranks together."""

    seq_len: int
    batch_size: int
    dp_rank: int
    dp_world_size: int
    num_workers: int


class PackedText(IterableDataset):
    """Packed windows of `source`, tokenised, for one rank.

    `iter()` starts at the beginning, or, once after `load_state_dict`, where the state was taken.

    Args:
        source: the corpus.
        tokenizer: torchtitan's; documents get its bos and eos, where it has them.
        layout: sizes and this rank's place.
        infinite: go on with the next epoch for ever; else end after one pass, in which every token is
            predicted once on one rank, and the last batches are filled up with ignored labels.
    """

    def __init__(self, source: Source, tokenizer: BaseTokenizer, layout: Layout, *, infinite: bool) -> None:
        self._source, self._tokenizer, self._layout, self._infinite = source, tokenizer, layout, infinite
        shards = layout.dp_world_size * max(1, layout.num_workers)
        self.by_window = not infinite or (source.size is not None and source.size < shards)
        self._cursor = Cursor()
        self._resume: Cursor | None = None

    def state_dict(self) -> dict[str, str]:
        """Where the next window begins, as one JSON text: a loader's workers send differences of states."""
        return {"cursor": json.dumps(asdict(self._cursor))}

    def load_state_dict(self, state: dict[str, str]) -> None:
        """The next `iter()` begins where `state` was taken."""
        self._cursor = self._resume = Cursor(**json.loads(state["cursor"]))

    def __iter__(self) -> Iterator[Sample]:
        self._cursor, self._resume = self._resume or Cursor(), None
        worker = get_worker_info()
        return self._samples(self._cursor, worker.id if worker is not None else 0)

    def _samples(self, start: Cursor, worker: int) -> Iterator[Sample]:
        number, end = start.window, start
        for window in pack(self._documents(start, worker), self._layout.seq_len, start.offset):
            number += 1
            end = Cursor(*window.next_document, window.next_offset, number)
            if self._is_mine(number - 1, worker):
                self._cursor = end
                yield self._sample(window)
        # The documents are at an end: fill the last round of batches, so that no rank ends before another.
        per_round = self._layout.dp_world_size * self._layout.batch_size
        for filler in range(number, -(-number // per_round) * per_round):
            if self._is_mine(filler, worker):
                self._cursor = replace(end, window=filler + 1)
                yield self._filler()

    def _is_mine(self, window: int, worker: int) -> bool:
        """Batch k of every rank comes from one round of windows, and from worker k mod num_workers."""
        if not self.by_window:
            return True
        ranks, batch = self._layout.dp_world_size, self._layout.batch_size
        round_ = window // (ranks * batch)
        return window % ranks == self._layout.dp_rank and round_ % max(1, self._layout.num_workers) == worker

    def _documents(self, start: Cursor, worker: int) -> Iterator[tuple[tuple[int, Any], np.ndarray]]:
        """Documents of all epochs from `start` on, each with (epoch, position) and its tokens."""
        workers = max(1, self._layout.num_workers)
        shard, shards = self._layout.dp_rank * workers + worker, self._layout.dp_world_size * workers
        if self.by_window:
            shard, shards = 0, 1
        epoch, document = start.epoch, start.document
        while True:
            total = 0
            for position, text in self._source.documents(epoch, shard, shards, document):
                with refusing(
                    f"{self._source.identity['dataset']}: the tokenizer can't read it", "give another"
                ):
                    ids = self._tokenizer.encode(text, add_bos=True, add_eos=True)
                tokens = np.asarray(ids, dtype=np.int32)
                total += len(tokens)
                yield (epoch, position), tokens
            if not self._infinite:
                return
            if total == 0 and document is None:
                raise DataError(
                    f"dataset = {self._source.identity['dataset']!r}: holds no text for shard {shard} of {shards} "
                    f"(ranks times num_workers); use fewer of these, or more documents"
                )
            epoch, document = epoch + 1, None

    def _sample(self, window: Window) -> Sample:
        n, missing = len(window.positions), self._layout.seq_len - len(window.positions)
        tokens = torch.from_numpy(window.tokens.astype(np.int64))
        inputs, labels, positions = tokens[:-1], tokens[1:], torch.from_numpy(window.positions)
        if missing:
            inputs = torch.cat([inputs, inputs.new_zeros(missing)])
            labels = torch.cat([labels, labels.new_full((missing,), IGNORE_INDEX)])
            positions = torch.cat([positions, torch.arange(n, n + missing)])
        return {"input": inputs, "positions": positions}, labels

    def _filler(self) -> Sample:
        n = self._layout.seq_len
        return {"input": torch.zeros(n, dtype=torch.long), "positions": torch.arange(n)}, torch.full(
            (n,), IGNORE_INDEX
        )
