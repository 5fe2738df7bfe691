"""A distributed checkpoint to a Hugging Face folder, and back: in one process, on a CPU.

Tensor by tensor: no more is in memory than the largest one, and what transformers makes one of.
"""

import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import WriteItem
from transformers import CONFIG_MAPPING, PretrainedConfig

from titanplans import disk, modeling
from titanplans.config import LoRA
from titanplans.errors import ConfigError, NotSaved
from titanplans.modeling import kernels
from titanplans.modeling.own import own_config
from titanplans.modeling.weights.adapters import adapter_config, peft_name, trained_names, write_adapter
from titanplans.modeling.weights.beside import written_beside
from titanplans.modeling.weights.files import refuse_full
from titanplans.modeling.weights.folder import open_folder
from titanplans.modeling.weights.lazy import LazyTensor
from titanplans.modeling.weights.load import match_folder
from titanplans.modeling.weights.merged import merged, merges
from titanplans.modeling.weights.save import lazily, write_folder
from titanplans.parallel.adapters import add_adapters
from titanplans.tensor_parallel.kept_dtypes import keeps_float32
from titanplans.training.checkpoint import folder as folders
from titanplans.training.checkpoint.card import CARD, Card, damage, read_card
from titanplans.training.checkpoint.match import OTHER_STATES, changes, cut, model_card
from titanplans.training.checkpoint.storage import Planner, Reader, Writer
from titanplans.training.data.vocabulary import default_tokenizer_path


def export(
    checkpoint: Path,
    folder: Path,
    *,
    config: str | None = None,
    dtype: str | None = None,
    max_shard_size: int | str = "5GB",
    tokenizer: str | None = None,
    adapter: bool = False,
) -> str:
    """Write the weights of a step-N folder as a Hugging Face folder; return in words what was written.

    Adapters are added to their weights, but where the checkpoint holds them alone.

    Args:
        checkpoint: of ours, or one without a card, torchtitan's, whose weights have the model's own names.
        folder: is not there yet.
        config: a config.json, or the folder of one; None for the card's.
        dtype: of the floating-point tensors; None for the saved.
        max_shard_size: bytes, or "500MB".
        tokenizer: a folder with a tokenizer; None for the one that the card names, if it is there.
        adapter: write the adapters as peft does, and not the weights.

    Raises:
        ConfigError, ModelError: the checkpoint is damaged or none, of another model, or `folder` is there.
        NotSaved: the disk is full, or refuses.
    """
    if not os.path.isfile(checkpoint / ".metadata"):
        hint = "name a step-N folder"
        if os.path.isfile(checkpoint / "config.json"):
            hint = "it is a Hugging Face folder already"
        raise ConfigError(
            f"export {checkpoint}: there is no distributed checkpoint in it (.metadata); {hint}"
        )
    card = read_card(checkpoint) if os.path.isfile(checkpoint / CARD) else None
    metadata = Reader(checkpoint).read_metadata()
    wrong = damage(checkpoint) if card is not None else cut(checkpoint, metadata)
    if wrong is not None:
        raise ConfigError(f"export {checkpoint}: {wrong}; take another checkpoint")
    kernels.install("cpu")
    hf_config = _config(config, card, checkpoint)
    tensors = _weights(metadata)
    reader = _ReadOnce(checkpoint, metadata)

    def read(name: str) -> torch.Tensor:
        state = {name: torch.empty(tensors[name].shape, dtype=tensors[name].dtype)}
        try:
            with _alone():
                dcp.load(state, storage_reader=reader, planner=Planner(), no_dist=True)
        except CheckpointException as error:
            raise ConfigError(
                f"export {checkpoint}: {name} in it is damaged; take another checkpoint"
            ) from error
        return state[name]

    adapted = _with_adapters(hf_config, card)
    if adapter and adapted is None:
        raise ConfigError(
            f"export {checkpoint}: there are no adapters in it (lora.rank): leave --adapter out"
        )
    if adapted is not None and (adapter or card.job.get("checkpoint.save_adapters_only")):  # type: ignore[union-attr]
        values = {peft_name(name): read(name) for name in trained_names(adapted)}
        if dtype is not None:
            values = {name: value.to(getattr(torch, dtype)) for name, value in values.items()}
        with written_beside(folder) as directory:
            write_adapter(directory, adapter_config(adapted), values)
        return f"{folder}: {_size(folder)}, adapters that peft.PeftModel.from_pretrained reads"
    written = tensors, read
    if adapted is not None:
        written = merged(tensors, read, merges(adapted))
    tokenizer = tokenizer or _tokenizer(card)
    with written_beside(folder) as directory:
        write_folder(
            directory,
            hf_config,
            lazily(*written),
            dtype=None if dtype is None else getattr(torch, dtype),
            max_shard_size=max_shard_size,
            tokenizer=tokenizer,
        )
    beside = f"the tokenizer of {tokenizer}" if tokenizer else "no tokenizer: --tokenizer names one"
    return f"{folder}: {_size(folder)}, {beside}"


def import_folder(
    folder: Path, checkpoint: Path, *, config: str | None = None, dtype: str | None = None
) -> str:
    """Write a Hugging Face folder as a distributed checkpoint of step 0, a seed; return in words what was written.

    Args:
        folder: safetensors, and config.json.
        checkpoint: is not there yet; its name is step-0, or anything but step-N.
        config: a config.json, or the folder of one; None for the folder's.
        dtype: of the floating-point tensors; None for the folder's.

    Raises:
        ConfigError, ModelError: the folder is damaged or of another model, or `checkpoint` is there.
        NotSaved: the disk is full, or refuses.
    """
    if os.path.exists(checkpoint):
        raise ConfigError(
            f"import: {checkpoint} is there already, and nothing is written over: name a new folder"
        )
    if re.fullmatch(r"step-[0-9]+", checkpoint.name) and checkpoint.name != "step-0":
        raise ConfigError(
            f"import: {checkpoint} would be a checkpoint of another step: no step was taken, name it step-0"
        )
    kernels.install("cpu")
    hf_config = modeling.load_config_file(config or folder)
    plain = modeling.build(hf_config)
    match = match_folder(plain, open_folder(folder))
    for name, again in match.again.items():
        if not torch.equal(again.read(), match.tensors[match.tied[name]].read()):
            raise ConfigError(
                f"import {folder}: its config.json ties {name} to {match.tied[name]}, and they differ"
            )
    tensors = {name: match.tensors[match.tied.get(name, name)] for name in plain.state_dict()}
    to = None if dtype is None else getattr(torch, dtype)
    planner = _LazyPlanner(tensors, to, keeps_float32(plain, to))
    state = planner.described
    writer = Writer(checkpoint, Card(0, "weights", model_card(hf_config), {}, {}))
    writer.single_file_per_rank = False  # torch keeps all tensors of a file until it is written
    writing = folders.writing_path(checkpoint)
    try:
        writing.mkdir(parents=True)
        refuse_full(writing, sum(tensor.nbytes for tensor in state.values()))
        with _alone():
            dcp.save(state, storage_writer=writer, planner=planner, no_dist=True)
    except FileExistsError as error:
        raise ConfigError(
            f"import: {writing} is there: another process writes it, or one was killed while it did; if so, remove it"
        ) from error
    except (CheckpointException, OSError, NotSaved) as error:
        shutil.rmtree(writing, ignore_errors=True)
        raise _failed(error, checkpoint) from error
    return f"{checkpoint}: {_size(checkpoint)}; a job starts from it by checkpoint.initial_load_path"


def _failed(error: BaseException, checkpoint: Path) -> BaseException:
    """Return what has failed in a save, as one line if the disk did."""
    causes: list[Any] = [error]
    if isinstance(error, CheckpointException):
        causes = [cause for cause, _ in error.failures.values()]
    refused = next((cause for cause in causes if isinstance(cause, OSError)), None)
    if refused is None:
        return causes[0]
    return NotSaved(f"{refused.filename or checkpoint} can't be written ({disk.reason(refused)})")


def _config(given: str | None, card: Card | None, checkpoint: Path) -> PretrainedConfig:
    """Return the model's config.

    Raises:
        ConfigError: neither the command nor a card says, or both do and differ.
    """
    import fla.models  # noqa: F401  # registers FLA's model types with transformers

    if given is not None:
        config = modeling.load_config_file(given)
        if card is not None and (differing := changes(card.model, model_card(config))):
            raise ConfigError(
                f"--config {given}: {checkpoint} is of another model ({differing}); leave it out"
            )
        return config
    if card is None:
        raise ConfigError(
            f"export {checkpoint}: it has no {CARD}, which says which model it is: give its --config"
        )
    values = dict(card.model)
    if "own_class" in values:
        return own_config(values["own_class"], values["own_arguments"])
    return CONFIG_MAPPING[values["model_type"]].from_dict(values)


def _tokenizer(card: Card | None) -> str | None:
    """Return the folder of the tokenizer that the job of a checkpoint had; None if there was no job, or it is gone."""
    if card is None or not card.job:
        return None
    published = card.job.get("checkpoint.initial_load_in_hf") and card.job.get("checkpoint.initial_load_path")
    named = card.job.get("model.hf_assets_path") or published or default_tokenizer_path()
    return named if os.path.isdir(named) else None


def _with_adapters(config: PretrainedConfig, card: Card | None) -> nn.Module | None:
    """Return the model of a checkpoint with its adapters, on meta; None if it has none."""
    values = {} if card is None else dict(card.job)
    given = {key.removeprefix("lora."): value for key, value in values.items() if key.startswith("lora.")}
    if given.get("rank") is None:
        return None
    model = modeling.build(config)
    add_adapters(model, LoRA(**given))
    return model


def _weights(metadata: Metadata) -> dict[str, torch.Tensor]:
    """Return a checkpoint's weights, on meta."""
    entries = metadata.state_dict_metadata.items()
    return {
        name: torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
        for name, entry in entries
        if isinstance(entry, TensorStorageMetadata) and name.partition(".")[0] not in OTHER_STATES
    }


@contextmanager
def _alone() -> Iterator[None]:
    """Say nothing of the one process, of which torch warns although it was told so."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


def _size(folder: Path) -> str:
    sizes = [path.stat().st_size for path in folder.iterdir()]
    return f"{sum(sizes) / 1e9:,.3f} GB in {len(sizes)} files"


class _ReadOnce(Reader):
    """A reader of many loads, whose index is read once."""

    def __init__(self, checkpoint: Path, metadata: Metadata):
        super().__init__(checkpoint)
        self._index = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._index


class _LazyPlanner(DefaultSavePlanner):
    """Saves tensors that are read when they are written, in `dtype` those that are `kept` in none."""

    def __init__(
        self, tensors: dict[str, LazyTensor], dtype: torch.dtype | None, kept: Callable[[str], bool]
    ):
        super().__init__()
        self._tensors = tensors
        cast = {name for name, t in tensors.items() if dtype and t.dtype.is_floating_point and not kept(name)}
        self.described = {
            name: torch.empty(t.shape, dtype=dtype if name in cast else t.dtype, device="meta")
            for name, t in tensors.items()
        }

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        name = write_item.index.fqn
        return self._tensors[name].read().to(self.described[name].dtype)
