"""The last step of a job as a Hugging Face folder with a card: checkpoint.last_save_in_hf.

Trained adapters are added to the weights, and also stand alone in peft's files in the folder ADAPTER.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from transformers import PretrainedConfig

from titanplans.adapters.low_rank import adapted
from titanplans.disk import sync
from titanplans.training.checkpoint import folder
from titanplans.training.checkpoint.card import Card, base_of, file_checksum, write_card
from titanplans.weights.adapters import gathered_adapter, write_adapter
from titanplans.weights.atomic import on_first_rank
from titanplans.weights.merged import whole_tensors
from titanplans.weights.save import write_folder

ADAPTER = "adapter"
"""A folder inside the step's: from_pretrained would add adapters that lie next to the weights a second time."""


def save(
    models: Sequence[nn.Module],
    checkpoint: Path,
    card: Card,
    *,
    config: PretrainedConfig,
    tokenizer: str | None,
    chat_template: str | None,
    dtype: torch.dtype,
    group: dist.ProcessGroup | None,
) -> None:
    """Write a step-N folder. Collective; rank 0 writes, and takes checksums as each file is whole.

    `models` and `group` are as for `whole_tensors`, the others as for `write_folder`.

    Raises:
        NotSaved: on every rank: the disk is full, or refuses; the partial files are in `folder.writing_path(checkpoint)`.
    """
    writing = folder.writing_path(checkpoint)
    files: dict[str, tuple[int, str]] = {}

    def seal(path: Path) -> None:
        sync(path)
        name = path.relative_to(writing).as_posix()
        files[name] = path.stat().st_size, file_checksum(path)

    def end() -> None:
        write_card(writing, replace(card, files=files))
        sync(writing)
        folder.commit(checkpoint)

    on_first_rank(partial(writing.mkdir, parents=True), writing)
    write_folder(
        writing,
        config,
        whole_tensors(models, group),
        dtype=dtype,
        max_shard_size="5GB",
        tokenizer=tokenizer,
        chat_template=chat_template,
        seal=seal,
    )
    if adapted(models[0]):
        found = gathered_adapter(models[0], base_of(card.job))
        on_first_rank(lambda: write_adapter(writing / ADAPTER, *found, seal=seal), writing)
    on_first_rank(end, checkpoint)
