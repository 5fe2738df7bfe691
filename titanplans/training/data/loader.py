"""The data loader of the trainer: torchtitan's, over packed text, which resumes strictly.

torchtitan's own loader only warns, or asserts, when a checkpoint is of another data-parallel degree or data set, or lacks
the state of this rank. Here that is an error, because such a run would go on with other data.
"""

import hashlib
import json
import warnings
from dataclasses import dataclass
from typing import Any

from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.tokenizer import BaseTokenizer

from titanplans.errors import DataError
from titanplans.training.data.checks import check_degree, check_identity
from titanplans.training.data.dataset import Layout, PackedText
from titanplans.training.data.sources import open_source

_PROBE = "Tokenizers differ: 3.14 | naïve façade | 日本語 | \t\n  def f(x): return x**2"


class TextDataLoader(ParallelAwareDataloader):
    """Batches of packed text: `{"input", "positions"}`, labels, each `[local_batch_size, seq_len]` int64.

    `labels[t]` is the token after `input[t]`, or IGNORE_INDEX where the last batch of a pass is filled
    up. `positions` count from the beginning of each document. All ranks of one `dp_rank` (tensor,
    context and pipeline parallel) get the same batches; those of different `dp_rank` share no window.

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

        infinite: bool = True
        """Start the next epoch when one ends; else end after one pass, all ranks together"""

        seed: int = 0
        """Of the order of the documents"""

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        tokenizer: BaseTokenizer,
        seq_len: int,
        local_batch_size: int,
        snapshot_every_n_steps: int | None = 1,
    ) -> None:
        source = open_source(
            config.dataset,
            config.dataset_path,
            split=config.split,
            text_column=config.text_column,
            seed=config.seed,
        )
        layout = Layout(seq_len, local_batch_size, dp_rank, dp_world_size, config.num_workers)
        windows = PackedText(source, tokenizer, layout, infinite=config.infinite)
        self._identity = source.identity | {
            "tokenizer": _describe(tokenizer),
            "num_workers": config.num_workers,
            "infinite": config.infinite,
        }
        if windows.by_window:  # which window is whose depends on these as well
            self._identity |= {"seq_len": seq_len, "local_batch_size": local_batch_size}
        with warnings.catch_warnings():
            # torchdata 0.11 calls what torch 2.13 deprecates; no user can act on it.
            warnings.filterwarnings("ignore", message="'set_vital' is deprecated", category=UserWarning)
            super().__init__(
                windows,
                dp_rank=dp_rank,
                dp_world_size=dp_world_size,
                batch_size=local_batch_size,
                num_workers=config.num_workers,
                persistent_workers=config.persistent_workers,
                pin_memory=config.pin_memory,
                prefetch_factor=config.prefetch_factor,
                snapshot_every_n_steps=snapshot_every_n_steps,
            )

    def state_dict(self) -> dict[str, Any]:
        """Where this rank stands, and what the position belongs to."""
        return super().state_dict() | {"identity": json.dumps(self._identity)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The next batch is the one that followed when `state_dict` was taken.

        Raises:
            DataError: it was taken at another data-parallel degree, of other data or by other settings.
        """
        if not state_dict:  # torchtitan: nothing was saved yet
            return
        check_degree(state_dict["world_size"], self.dp_world_size)
        if self._rank_id not in state_dict:
            raise DataError(
                f"the checkpoint holds no data loader state for {self._rank_id}; start the data anew with "
                'exclude_from_loading = ["dataloader"] in [checkpoint]'
            )
        check_identity(json.loads(state_dict["identity"]), self._identity)
        super().load_state_dict(state_dict)


def _describe(tokenizer: BaseTokenizer) -> str:
    ids = tokenizer.encode(_PROBE, add_bos=True, add_eos=True)
    return f"{tokenizer.get_vocab_size()} tokens, {hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:8]}"
