"""The data loader of the trainer: batches of packed text, and a place that any number of ranks can go on from.

torchtitan's loader keeps a place for each data-parallel rank, as a pickle, and can't be resumed by another number of ranks.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader
from torchtitan.components.dataloader import BaseDataLoader, ParallelAwareDataloader
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.tools.logging import logger

from titanplans.config.sections.data import Data
from titanplans.errors import DataError
from titanplans.training.data.checks import PLACE, check_identity
from titanplans.training.data.dataset import Ended, PackedText, StepBatch
from titanplans.training.data.figures import Figures, of_all_ranks
from titanplans.training.data.fingerprint import Fingerprint, check_files
from titanplans.training.data.mixture import open_packed
from titanplans.training.data.streams import BatchSlice, DataPosition, Streams, divide, merged
from titanplans.training.data.workers import live_as_long_as_the_rank

_PROBE = "Tokenizers differ: 3.14 | naïve façade | 日本語 | \t\n  def f(x): return x**2"
_SPLIT_UP = "tokenizer, by its own tokens"


class TextDataLoader(BaseDataLoader):
    """Batches of packed text, or conversations: `{"input", "positions"}`, labels, each `[local_batch_size, seq_len]` int64.

    `labels[t]` is the token after `input[t]`, or IGNORE_INDEX where a sequence is filled up, or what a conversation
    says doesn't count. `positions` count from the beginning of each document. All ranks of one `dp_rank` (tensor,
    context and pipeline parallel) get the same batches; those of different `dp_rank` share no window.

    The batches of all ranks for one optimizer step are, together, the same sequences for any number of ranks.

    Raises:
        DataError: the data set can't be used, or a loaded state belongs to another job.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):
        """Which text, in which order."""

        data: Data
        """How documents become rows, `documents` decided, and all `sources`"""

        infinite: bool = True
        """Go on until the run is ended; else end after one pass, all ranks together"""

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
        tokenizer: BaseTokenizer,
        seq_len: int,
        local_batch_size: int,
        snapshot_every_n_steps: int | None = None,
    ) -> None:
        del snapshot_every_n_steps  # of torchdata's loader; here the place is known after each step
        data = config.data
        self._parts = [open_packed(of, data, config.seed, tokenizer, seq_len) for of in data.sources]
        self._weights = {of.title: of.weight for of in data.sources}
        in_step = config.global_batch_size or local_batch_size * dp_world_size
        self._share = BatchSlice(in_step // dp_world_size, dp_rank, dp_world_size, max(1, config.num_workers))
        streams = divide(self._choose_streams, self._share) if config.infinite else Streams(1)
        self._place = DataPosition(streams)
        repeat = data.exhausted == "repeat"
        self._ends = config.infinite and not repeat
        self.shares = PackedText(
            self._parts,
            seq_len,
            self._share,
            self._place,
            weights=[*self._weights.values()] if config.infinite else None,
            repeat=repeat,
        )
        self._batch_size = local_batch_size
        self._tells = len(self._parts) > 1 or data.packing != "cut" or data.sources[0].chat.enable
        self._figures = Figures([part.name for part in self._parts])
        self._identity = self._of_sources() | {
            "tokenizer": _describe(tokenizer),
            _SPLIT_UP: _digest(_own_tokens(tokenizer)),
            "infinite": config.infinite,
        }
        self._fingerprint: Fingerprint | None = None
        workers = config.num_workers > 0
        self._loader = DataLoader(
            self.shares,
            batch_size=None,
            collate_fn=_as_it_is,  # pyrefly: ignore[bad-argument-type]  without a batch size it is given an item
            num_workers=config.num_workers,
            worker_init_fn=partial(live_as_long_as_the_rank, os.getpid()) if workers else None,
            persistent_workers=workers and config.persistent_workers,
            pin_memory=config.pin_memory,
            prefetch_factor=config.prefetch_factor if workers else None,
        )

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        place = self.shares.start
        shares = iter(self._loader)  # workers have a copy of `start` now
        self.shares.start = self.shares.beginning
        return self._batches(place, shares)

    def _batches(
        self, place: DataPosition, shares: Iterator[StepBatch | DataError | Ended]
    ) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        self._place = place
        for share in shares:
            if isinstance(share, DataError):
                raise share
            if self._ends and any(of_all_ranks(isinstance(share, Ended))):
                return
            assert not isinstance(share, Ended)
            self._figures.count(share)
            parts = [
                tensor.split(self._batch_size) for tensor in (share.tokens, share.positions, share.labels)
            ]
            for number, (own_tokens, own_positions, own_labels) in enumerate(zip(*parts, strict=True), 1):
                if number == len(parts[0]):
                    place = self._place = replace(
                        place,
                        sequences=place.sequences + self._share.global_batch,
                        cursors={**place.cursors, **share.cursors},
                    )
                yield {"input": own_tokens, "positions": own_positions}, own_labels

    def take_figures(self) -> dict[str, float]:
        """Return what all ranks together have read since they last asked, see docs/data.md; {} where nothing varies."""
        return self._figures.take(self._share.ranks) if self._tells else {}

    def _choose_streams(self, counts: Sequence[int]) -> int:
        return min(part.source.choose_streams(counts) for part in self._parts)

    def _of_sources(self) -> dict[str, Any]:
        """What must be the same for a place to mean the same rows: of a mixture each source's under its name."""
        if len(self._parts) == 1:
            return self._parts[0].identity
        each = {
            f"{key} of {part.name}": value for part in self._parts for key, value in part.identity.items()
        }
        return {"data.sources": [part.name for part in self._parts]} | each

    def state_dict(self) -> dict[str, str]:
        """Where the run stands after its last whole step, and what the place belongs to: one JSON text.

        All ranks call it together, and get the same.
        """
        places = of_all_ranks(self._place) if self._share.ranks > 1 else [self._place]
        state = {
            "identity": self._identity,
            "files": self._taken().to_json(),
            "global_batch_size": self._share.global_batch,
            "weights": self._weights,
            **merged(places).to_json(),
        }
        return {PLACE: json.dumps(state)}

    def load_state_dict(self, state_dict: dict[str, str]) -> None:
        """The next batch is the one that followed when `state_dict` was taken, on any number of ranks and workers.

        Raises:
            DataError: it is of other data, or by other settings; or a file has changed since.
        """
        if not state_dict:  # torchtitan: nothing was saved yet
            return
        state = json.loads(state_dict[PLACE])
        saved = Fingerprint.from_json(state["files"])
        moved = saved.files == self._taken().files != {}  # the same files, wherever they lie now
        paths = [key for key in self._identity if key.split()[0] == "dataset"]
        same = {key: state["identity"].get(key) for key in paths} if moved else {}
        # Keys that checkpoints of before do not have.
        newer = {_SPLIT_UP: self._identity[_SPLIT_UP]} | (
            {"packing": "cut"} if "packing" in self._identity else {}
        )
        check_identity(newer | state["identity"], self._identity | same)
        check_files(saved, self._taken())
        place = DataPosition.from_json(state)
        if (weights := state.get("weights", self._weights)) != self._weights:
            logger.info(f"data.sources: weights are {self._weights} from here on, and were {weights}")
            place = replace(place, weighted_since=place.sequences)
        self._place = self.shares.start = place
        if (size := state["global_batch_size"]) != self._share.global_batch:
            logger.info(
                f"a global batch has {self._share.global_batch} sequences now, and had {size} in the checkpoint: training "
                f"goes on with the same text, in other batches; training.global_batch_size = {size} keeps them"
            )

    def _taken(self) -> Fingerprint:
        if self._fingerprint is None:
            named = len(self._parts) > 1
            files = [
                (f"{part.name}: {name}" if named else name, file)
                for part in self._parts
                for name, file in part.source.files
            ]
            self._fingerprint = Fingerprint.of(files)
        return self._fingerprint


def _as_it_is(share: StepBatch | DataError | Ended) -> StepBatch | DataError | Ended:
    return share


def _describe(tokenizer: BaseTokenizer) -> str:
    ids = tokenizer.encode(_PROBE, add_bos=True, add_eos=True)
    return f"{tokenizer.get_vocab_size()} tokens, {_digest(ids)}"


def _own_tokens(tokenizer: BaseTokenizer) -> list[int]:
    """The tokens of the text that all tokens make, one after another: a merge or a token that differs shows there."""
    return tokenizer.encode(tokenizer.decode(list(range(tokenizer.get_vocab_size()))))


def _digest(ids: list[int]) -> str:
    return hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:8]
