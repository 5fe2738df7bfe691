"""The data loader of the trainer: batches of packed text, and a place that any number of ranks can go on from.

torchtitan's loader keeps a place for each data-parallel rank, as a pickle, and can't be resumed by another number of ranks.
"""

import hashlib
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from torchtitan.components.dataloader import BaseDataLoader, ParallelAwareDataloader
from torchtitan.components.tokenizer import BaseTokenizer, HuggingFaceTokenizer
from torchtitan.tools.logging import logger

from titanplans.config.sections.model import Chat
from titanplans.errors import DataError
from titanplans.training.data.chat.chat import ChatFormat
from titanplans.training.data.checks import PLACE, check_identity
from titanplans.training.data.corpus.sources import open_source
from titanplans.training.data.dataset import PackedText, StepBatch
from titanplans.training.data.fingerprint import Fingerprint, check_files
from titanplans.training.data.streams import BatchSlice, DataPosition, Streams, divide, merged
from titanplans.training.launch.orphans import end_with_parent

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

        dataset: str = "stdlib"
        """'stdlib'; 'local' (or 'text', 'json', 'parquet') with dataset_path; a Hugging Face data set's name"""

        dataset_path: str | None = None
        """File, folder or glob of a local corpus; or a local copy of a Hugging Face data set"""

        split: str = "train"
        """'train', 'validation' or 'all'; for a Hugging Face data set, one of its own splits"""

        text_column: str = "text"
        """Column or field that holds the text"""

        chat: Chat | None = None
        """Read conversations instead, as this says"""

        infinite: bool = True
        """Start the next epoch when one ends; else end after one pass, all ranks together"""

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
        chat = None
        if config.chat is not None:
            assert isinstance(tokenizer, HuggingFaceTokenizer)  # the trainer's
            chat = ChatFormat(config.chat, tokenizer.tokenizer_path, seq_len)
        self._source = open_source(
            config.dataset,
            config.dataset_path,
            split=config.split,
            text_column=config.text_column,
            seed=config.seed,
            chat=chat,
        )
        in_step = config.global_batch_size or local_batch_size * dp_world_size
        self._share = BatchSlice(in_step // dp_world_size, dp_rank, dp_world_size, max(1, config.num_workers))
        streams = divide(self._source.choose_streams, self._share) if config.infinite else Streams(1)
        self._place = DataPosition(streams)
        self._windows = PackedText(
            self._source, tokenizer, seq_len, self._share, self._place, chat=chat, infinite=config.infinite
        )
        self._batch_size = local_batch_size
        self._identity = self._source.identity | {
            "tokenizer": _describe(tokenizer),
            _SPLIT_UP: _digest(_own_tokens(tokenizer)),
            "infinite": config.infinite,
        }
        self._fingerprint: Fingerprint | None = None
        workers = config.num_workers > 0
        self._loader = DataLoader(
            self._windows,
            batch_size=None,
            collate_fn=_as_it_is,  # pyrefly: ignore[bad-argument-type]  without a batch size it is given an item
            num_workers=config.num_workers,
            worker_init_fn=partial(_live_as_long_as_the_rank, os.getpid()) if workers else None,
            persistent_workers=workers and config.persistent_workers,
            pin_memory=config.pin_memory,
            prefetch_factor=config.prefetch_factor if workers else None,
        )

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        place = self._windows.start
        shares = iter(self._loader)  # workers have a copy of `start` now
        self._windows.start = self._windows.beginning
        return self._batches(place, shares)

    def _batches(
        self, place: DataPosition, shares: Iterator[StepBatch | DataError]
    ) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        self._place = place
        for share in shares:
            if isinstance(share, DataError):
                raise share
            tokens, positions, labels, cursors = share
            parts = [tensor.split(self._batch_size) for tensor in (tokens, positions, labels)]
            for number, (own_tokens, own_positions, own_labels) in enumerate(zip(*parts, strict=True), 1):
                if number == len(parts[0]):
                    place = self._place = replace(
                        place,
                        sequences=place.sequences + self._share.global_batch,
                        cursors={**place.cursors, **cursors},
                    )
                yield {"input": own_tokens, "positions": own_positions}, own_labels

    def state_dict(self) -> dict[str, str]:
        """Where the run stands after its last whole step, and what the place belongs to: one JSON text.

        All ranks call it together, and get the same.
        """
        places = [self._place]
        if self._share.ranks > 1 and dist.is_initialized():
            gathered: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(gathered, self._place)
            places = gathered
        state = {
            "identity": self._identity,
            "files": self._taken().to_json(),
            "global_batch_size": self._share.global_batch,
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
        same = {"dataset": state["identity"]["dataset"]} if moved else {}
        newer = {_SPLIT_UP: self._identity[_SPLIT_UP]}  # a key that checkpoints of before do not have
        check_identity(newer | state["identity"], self._identity | same)
        check_files(saved, self._taken())
        self._place = self._windows.start = DataPosition.from_json(state)
        if (size := state["global_batch_size"]) != self._share.global_batch:
            logger.info(
                f"a global batch has {self._share.global_batch} sequences now, and had {size} in the checkpoint: training "
                f"goes on with the same text, in other batches; training.global_batch_size = {size} keeps them"
            )

    def _taken(self) -> Fingerprint:
        if self._fingerprint is None:
            self._fingerprint = Fingerprint.of(self._source.files)
        return self._fingerprint


def _live_as_long_as_the_rank(rank: int, worker: int) -> None:
    """Let a worker end with its rank, and not before: a scheduler's SIGTERM reaches it, too, and the rank may still save.

    The rank's own ends it: Python sends one as it exits, and waits for the worker.

    Args:
        rank: the process id of the rank: asked now, it may have ended already, and another be the parent.
        worker: which of the rank's it is.
    """
    end_with_parent(rank)
    if sys.platform == "linux":  # elsewhere it can't be asked who has sent a signal
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_end_when_the_rank_asks, daemon=True).start()


def _end_when_the_rank_asks() -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)


def _as_it_is(share: StepBatch | DataError) -> StepBatch | DataError:
    return share


def _describe(tokenizer: BaseTokenizer) -> str:
    ids = tokenizer.encode(_PROBE, add_bos=True, add_eos=True)
    return f"{tokenizer.get_vocab_size()} tokens, {_digest(ids)}"


def _own_tokens(tokenizer: BaseTokenizer) -> list[int]:
    """The tokens of the text that all tokens make, one after another: a merge or a token that differs shows there."""
    return tokenizer.encode(tokenizer.decode(list(range(tokenizer.get_vocab_size()))))


def _digest(ids: list[int]) -> str:
    return hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:8]
