"""The last step of a job as a Hugging Face folder with a card: checkpoint.last_save_in_hf.

Trained adapters are added to the weights, and also stand alone in peft's files in the folder ADAPTER.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import nn
from transformers import PretrainedConfig

from titanplans import modeling
from titanplans.adapters.low_rank import adapted
from titanplans.disk import sync
from titanplans.training.checkpoint import folder
from titanplans.training.checkpoint.card import Card, base_of, file_checksum, write_card
from titanplans.weights.adapters import gathered_adapter, write_adapter
from titanplans.weights.atomic import on_first_rank
from titanplans.weights.gather import stored
from titanplans.weights.merged import handed_on, merged, merges
from titanplans.weights.save import check_names, lazily, write_folder

ADAPTER = "adapter"
"""A folder inside the step's: from_pretrained would add adapters that lie next to the weights a second time."""


def check(model: nn.Module, config: PretrainedConfig | None) -> None:
    """Refuse a model that can't be saved so.

    Raises:
        ModelError: it holds other tensors than the model of its config.
    """
    assert config is not None
    tensors, _ = merged(stored(model)[0], lambda name: torch.empty(0), merges(model))
    check_names(modeling.build(config), tensors)


def save(
    model: nn.Module,
    checkpoint: Path,
    card: Card,
    *,
    config: PretrainedConfig | None,
    tokenizer: str | None,
    dtype: torch.dtype,
) -> None:
    """Write a step-N folder. Collective; rank 0 writes, and takes checksums as each file is whole.

    Raises:
        NotSaved: on every rank: the disk is full, or refuses; the partial files are in `folder.writing_path(checkpoint)`.
    """
    assert config is not None
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
        lazily(*handed_on(model)),
        dtype=dtype,
        max_shard_size="5GB",
        tokenizer=tokenizer,
        seal=seal,
    )
    if adapted(model):
        found = gathered_adapter(model, base_of(card.job))

        def write() -> None:
            write_adapter(writing / ADAPTER, *found)
            for path in (writing / ADAPTER).iterdir():
                seal(path)
            sync(writing / ADAPTER)

        on_first_rank(write, writing)
    on_first_rank(end, checkpoint)
