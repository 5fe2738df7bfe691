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

from titanplans import modeling
from titanplans.adapters.low_rank import adapted
from titanplans.disk import sync
from titanplans.training.checkpoint import folder
from titanplans.training.checkpoint.card import Card, base_of, file_checksum, write_card
from titanplans.weights.adapters import gathered_adapter, write_adapter
from titanplans.weights.atomic import on_first_rank
from titanplans.weights.gather import of_stages, stored
from titanplans.weights.merged import handed_on, merged, merges
from titanplans.weights.save import check_names, lazily, write_folder

ADAPTER = "adapter"
"""A folder inside the step's: from_pretrained would add adapters that lie next to the weights a second time."""


def check(
    models: Sequence[nn.Module], config: PretrainedConfig | None, group: dist.ProcessGroup | None = None
) -> None:
    """Refuse a model that can't be saved so.

    Args:
        models: the model, or the stages of it that this process has.
        config: the model's.
        group: the ranks of the pipeline; None: there is one model.

    Raises:
        ModelError: it holds other tensors than the model of its config.
    """
    assert config is not None
    tensors = stored(models[0])[0] if group is None else of_stages(models, group)[0]
    check_names(modeling.build(config), merged(tensors, lambda name: torch.empty(0), merges(models[0]))[0])


def save(
    models: Sequence[nn.Module],
    checkpoint: Path,
    card: Card,
    *,
    config: PretrainedConfig | None,
    tokenizer: str | None,
    dtype: torch.dtype,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write a step-N folder. Collective; rank 0 writes, and takes checksums as each file is whole. See `check`.

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
        lazily(*(handed_on(models[0]) if group is None else of_stages(models, group))),
        dtype=dtype,
        max_shard_size="5GB",
        tokenizer=tokenizer,
        seal=seal,
    )
    if adapted(models[0]):
        found = gathered_adapter(models[0], base_of(card.job))

        def write() -> None:
            write_adapter(writing / ADAPTER, *found)
            for path in (writing / ADAPTER).iterdir():
                seal(path)
            sync(writing / ADAPTER)

        on_first_rank(write, writing)
    on_first_rank(end, checkpoint)
