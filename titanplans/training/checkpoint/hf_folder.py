"""Save the last step of a job as a Hugging Face folder with a manifest (checkpoint.last_save_in_hf)."""

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
from titanplans.training.checkpoint.manifest import (
    Manifest,
    file_checksum,
    initial_weights_folder,
    write_manifest,
)
from titanplans.training.checkpoint.multi_token import MultiTokenLayers
from titanplans.weights.adapters import gather_adapter, write_adapter
from titanplans.weights.atomic import on_first_rank
from titanplans.weights.merged import full_tensors
from titanplans.weights.save import write_folder

ADAPTER = "adapter"
"""The subfolder for peft's files. If they were next to the weights, from_pretrained would add the adapters a second
time."""


def save_hf_folder(
    models: Sequence[nn.Module],
    checkpoint: Path,
    manifest: Manifest,
    *,
    config: PretrainedConfig,
    tokenizer: str | None,
    chat_template: str | None,
    dtype: torch.dtype,
    group: dist.ProcessGroup | None,
    layers: MultiTokenLayers | None,
) -> None:
    """Write a folder step-N in Hugging Face's format. Collective; rank 0 writes.

    Trained adapters are merged into the weights, and also written as peft's files into the subfolder ADAPTER.

    Args:
        models, group: arguments of `full_tensors`.
        checkpoint: the folder step-N.
        manifest: the manifest without `files`, which are added here.
        config, tokenizer, chat_template, dtype: arguments of `write_folder`.
        layers: on rank 0, the layers of multi-token prediction that are also written; None: there are none.

    Raises:
        NotSaved: the disk is full, or refuses to write. It is raised on every rank, and incomplete files are left in
            `folder.writing_path(checkpoint)`.
    """
    writing = folder.writing_path(checkpoint)
    files: dict[str, tuple[int, str]] = {}

    def record(path: Path) -> None:
        # Called for each file once it is complete, so that its bytes are still in the page cache for the checksum.
        sync(path)
        name = path.relative_to(writing).as_posix()
        files[name] = path.stat().st_size, file_checksum(path)

    def finish() -> None:
        write_manifest(writing, replace(manifest, files=files))
        sync(writing)
        folder.commit(checkpoint)

    on_first_rank(partial(writing.mkdir, parents=True), writing)
    write_folder(
        writing,
        config,
        full_tensors(models, group),
        dtype=dtype,
        max_shard_size="5GB",
        tokenizer=tokenizer,
        chat_template=chat_template,
        others=None if layers is None else layers.tensors(),
        seal=record,
    )
    if adapted(models[0]):
        adapter = gather_adapter(models[0], initial_weights_folder(manifest.job))
        on_first_rank(lambda: write_adapter(writing / ADAPTER, *adapter, seal=record), writing)
    on_first_rank(finish, checkpoint)
