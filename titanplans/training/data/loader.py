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
from titanplans.split.objects import of_all
from titanplans.training.data.chat.chat import ChatFormat
from titanplans.training.data.checks import PLACE
from titanplans.training.data.corpus.sources import open_source
from titanplans.training.data.dataset import Ended, Figures, Flag, PackedText, StepBatch
from titanplans.training.data.mixture import PackedSource
from titanplans.training.data.resume import VERSION, fingerprint, resume
from titanplans.training.data.streams import BatchSlice, DataPosition, Streams, divide, merged
from titanplans.training.launch.orphans import live_as_long_as_the_rank

_PROBE = "Tokenizers differ: 3.14 | naïve façade | 日本語 | \t\n  def f(x): return x**2"


class TextDataLoader:
    """Batches of packed text, or conversations: `{"input", "positions"}`, labels, each `[local_batch_size, seq_len]` int64.

    `labels[t]` is the token after `input[t]`, or IGNORE_INDEX where a sequence is filled up, or what a conversation
    says doesn't count. `positions` count from the beginning of each document. All ranks of one `dp_rank` (tensor,
    context and pipeline parallel) get the same batches; those of different `dp_rank` share no window.

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
        """How documents become rows, `documents` decided, and all `sources`"""

        infinite: bool = True
        """A mixture by weight, until the run or `epochs` are over; else one pass, of the sources one after another"""

        epochs: int | None = None
        """Passes over the data; None: as many as the run takes"""

        seed: int = 0
        """Of the order of the documents"""

        global_batch_size: int | None = None
        """Sequences in one optimizer step, over all ranks; None: one batch of each data-parallel rank"""

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
        self._parts: list[PackedSource] = []
        for of in data.sources:
            chat = ChatFormat(of.chat, tokenizer.tokenizer_path, seq_len) if of.chat.enable else None
            source = open_source(of, seed=config.seed, chat=chat)
            self._parts.append(PackedSource(of.title, source, data, tokenizer, seq_len, chat))
        self._weights = {of.title: of.weight for of in data.sources}
        in_step = config.global_batch_size or local_batch_size * dp_world_size
        self._share = BatchSlice(
            in_step // dp_world_size, dp_rank, dp_world_size, max(1, config.workers.num_workers)
        )
        streams = Streams(1)
        if config.infinite:
            streams = divide(
                lambda ns: min(part.source.choose_streams(ns) for part in self._parts), self._share
            )
        self._place = DataPosition(streams, rest=not config.infinite)
        self._shares = PackedText(
            self._parts,
            seq_len,
            self._share,
            self._place,
            weights=[*self._weights.values()] if config.infinite else None,
            epochs=config.epochs if config.infinite and data.exhausted == "repeat" else 1,
        )
        self._one_has = Flag()
        self._batch_size = local_batch_size
        self._tells = len(self._parts) > 1 or data.packing != "cut" or data.sources[0].chat.enable
        self._figures = Figures([part.name for part in self._parts])
        self._identity = {"tokenizer": _describe(tokenizer), "infinite": config.infinite}
        self._fingerprints: list[dict[str, str]] = []
        options = config.workers
        has_workers = options.num_workers > 0
        self._open = partial(
            DataLoader,
            self._shares,
            batch_size=None,
            collate_fn=_as_it_is,  # pyrefly: ignore[bad-argument-type]  without a batch size it is given an item
            num_workers=options.num_workers,
            worker_init_fn=partial(live_as_long_as_the_rank, os.getpid()) if has_workers else None,
            persistent_workers=has_workers and options.persistent_workers,
            pin_memory=options.pin_memory,
            prefetch_factor=options.prefetch_factor if has_workers else None,
        )
        self._loader = self._open()

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        place = self._place = self._shares.start
        return self._batches(self._steps(place, self._begin(place, self._loader)))

    def steps(self) -> Iterator[StepBatch]:
        """Yield the rank's share of each step, from the beginning."""
        self._place = self._shares.beginning
        for share, after in self._steps(self._place, self._begin(self._place, self._loader)):
            self._place = after
            yield share

    def _begin(self, place: DataPosition, loader: DataLoader[Any]) -> Iterator[StepBatch | DataError | Ended]:
        self._shares.start = place
        shares = iter(loader)  # workers have a copy of `start` now
        self._shares.start = self._shares.beginning
        return shares

    def _steps(
        self, place: DataPosition, shares: Iterator[StepBatch | DataError | Ended]
    ) -> Iterator[tuple[StepBatch, DataPosition]]:
        """Yield the shares, each with the place behind its step.

        Raises:
            DataError: on all ranks, in the same step.
        """
        while (share := next(shares, None)) is not None:
            if self._one_has(isinstance(share, DataError | Ended)):
                if errors := [found for found in of_all(share) if isinstance(found, DataError)]:
                    raise errors[0]
                place = replace(merged(of_all(place)), rest=True)
                # Its own generator: a job that resumes from here on draws nothing for it.
                shares = self._begin(place, self._open(generator=torch.Generator()))
                continue
            assert isinstance(share, StepBatch)
            place = replace(
                place,
                sequences=place.sequences + self._share.global_batch,
                cursors={**place.cursors, **share.cursors},
            )
            yield share, place

    def _batches(
        self, steps: Iterator[tuple[StepBatch, DataPosition]]
    ) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        for share, place in steps:
            self._figures.count(share)
            parts = [
                tensor.split(self._batch_size) for tensor in (share.tokens, share.positions, share.labels)
            ]
            for number, (own_tokens, own_positions, own_labels) in enumerate(zip(*parts, strict=True), 1):
                if number == len(parts[0]):
                    self._place = place
                yield {"input": own_tokens, "positions": own_positions}, own_labels

    def take_figures(self) -> dict[str, float]:
        """Return what all ranks together have read since they last asked, see docs/data.md; {} where nothing varies."""
        return self._figures.take(self._share.ranks) if self._tells else {}

    def read(self) -> dict[str, tuple[float, str]]:
        """Return how often each source was read, by its name, as a number and in words; all ranks ask together."""
        place = merged(of_all(self._place))
        return {
            part.name: part.read(
                place.streams.count, {s: cursor.places[n] for s, cursor in place.cursors.items()}
            )
            for n, part in enumerate(self._parts)
        }

    def state_dict(self) -> dict[str, str]:
        """Where the run stands after its last whole step, and what the place belongs to: one JSON text.

        All ranks call it together, and get the same.
        """
        self._fingerprints = self._fingerprints or [fingerprint(part.source.files) for part in self._parts]
        state = {
            "version": VERSION,
            "identity": self._identity,
            "sources": {
                part.name: {"weight": self._weights[part.name], "identity": part.identity, "files": files}
                for part, files in zip(self._parts, self._fingerprints, strict=True)
            },
            "global_batch_size": self._share.global_batch,
            **merged(of_all(self._place)).to_json(),
        }
        return {PLACE: json.dumps(state)}

    def load_state_dict(self, state_dict: dict[str, str]) -> None:
        """The next batch is the one that followed when `state_dict` was taken, on any number of ranks and workers.

        Raises:
            DataError: as `check_state`.
        """
        if not state_dict:  # the checkpoint is another program's, and has none
            return
        self._place, said = self.check_state(state_dict)
        self._shares.start = self._place
        for line in said:
            logger.info(line)

    def check_state(self, state_dict: dict[str, str]) -> tuple[DataPosition, list[str]]:
        """Return the place in the data where `load_state_dict` goes on, and what it says.

        Raises:
            DataError: it is of other data, or by other settings; or a text has changed that was read.
        """
        state = json.loads(state_dict[PLACE])
        place, said = resume(state, self._parts, self._weights, self._identity)
        if (size := state["global_batch_size"]) != self._share.global_batch:
            said.append(
                f"a global batch has {self._share.global_batch} sequences now, and had {size} in the checkpoint: training "
                f"goes on with the same text, in other batches; training.global_batch_size = {size} keeps them"
            )
        return place, said


def _as_it_is(share: StepBatch | DataError | Ended) -> StepBatch | DataError | Ended:
    return share


def _describe(tokenizer: HuggingFaceTokenizer) -> str:
    """The vocabulary's size, and a digest of the encoding of all tokens' text, in which another merge shows."""
    size = tokenizer.get_vocab_size()
    ids = tokenizer.encode(_PROBE + tokenizer.decode(list(range(size))), add_bos=True, add_eos=True)
    return f"{size} tokens, {hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:8]}"
