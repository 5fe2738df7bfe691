"""A model as a Hugging Face folder: published names, safetensors of a chosen size, with config.json and tokenizer.

Headers are known before a value is, so each tensor is gathered, written to its place and forgotten. The folder is written
as `.NAME.writing` in the same folder, synced to the disk, and renamed when it is whole.
"""

import copy
import json
import os
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from titanplans.disk import sync
from titanplans.errors import ModelError
from titanplans.modeling.build import build
from titanplans.precision.kept_dtypes import keeps_float32
from titanplans.weights.atomic import on_first_rank, written_atomically
from titanplans.weights.compare import check_copies, differences, once
from titanplans.weights.files import copy_tokenizer, refuse_full, write_config, write_safetensors
from titanplans.weights.folder import INDEX
from titanplans.weights.lazy import LazyTensor, lazily
from titanplans.weights.merged import whole_tensors
from titanplans.weights.names import to_published


def save_weights(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    tokenizer: str | os.PathLike[str] | None = None,
    config: PretrainedConfig | None = None,
) -> None:
    """Write a model, split in any way, as a folder that transformers' `from_pretrained` loads. Collective; rank 0 writes.

    Adapters are added to their weights; `save_adapter` writes them alone. Rank 0 has one whole tensor on the CPU at a time,
    and each rank has it on its device.

    Args:
        model: of transformers or FLA, as `titanplans.modeling.build` or the library made it.
        folder: is not there yet, or empty.
        dtype: of all floating-point tensors but those that the model keeps in float32; None leaves each as it is.
        max_shard_size: bytes of a file at most, or with a unit, "500MB"; a larger tensor has a file of its own.
        tokenizer: a folder whose tokenizer files are copied, if there is one.
        config: what config.json says; None for the model's own, which generates with a cache.

    Raises:
        ModelError: on every rank: the folder is there, or the model holds what transformers does not know.
        NotSaved: on every rank: the disk is full, or refuses. The written part is removed.
    """
    config = _generating(model) if config is None else config
    target = Path(folder)
    tensors = whole_tensors([model])
    with written_atomically(target) as directory:
        write_folder(
            directory, config, tensors, dtype=dtype, max_shard_size=max_shard_size, tokenizer=tokenizer
        )


def _generating(model: nn.Module) -> PretrainedConfig:
    """Return the model's config, with the cache that `build` has switched off for training."""
    config = copy.deepcopy(getattr(model, "config", None))
    if not isinstance(config, PretrainedConfig):
        raise ModelError(
            f"{type(model).__name__} has no config of transformers, so no config.json can be written: save what "
            "titanplans.gather_full_state_dict(model) returns on rank 0"
        )
    text = config.get_text_config()
    if hasattr(text, "use_cache"):
        text.use_cache = True
    return config


def write_folder(
    directory: Path,
    config: PretrainedConfig,
    tensors: Mapping[str, LazyTensor],
    *,
    dtype: torch.dtype | None,
    max_shard_size: int | str,
    tokenizer: str | os.PathLike[str] | None,
    chat_template: str | None = None,
    seal: Callable[[Path], None] = sync,
) -> None:
    """Write all files of a model into `directory`, and bring them to the disk. Collective if reading `tensors` is.

    Args:
        directory: there and empty, on rank 0.
        config: the model's.
        tensors: name in the module tree -> tensor. Tied ones may be there under each name, and must be equal then.
        dtype, max_shard_size, tokenizer: as for `save_weights`.
        chat_template: Jinja that takes the place of the tokenizer's own.
        seal: called on rank 0 with each file that is whole; brings it to the disk.

    Raises:
        ModelError, NotSaved: as `save_weights` does, which removes nothing here.
    """
    plain = build(config)
    # Each is read whole once, though its published parts may be read one by one.
    published = _published(plain, lazily(tensors, lambda name: tensors[name].read()))
    kept = keeps_float32(plain, dtype)
    dtypes = {
        name: dtype if dtype and t.dtype.is_floating_point and not kept(t.name) else t.dtype
        for name, t in published.items()
    }
    metas = {name: torch.empty(t.shape, dtype=dtypes[name], device="meta") for name, t in published.items()}
    try:
        split = split_torch_state_dict_into_shards(
            metas, filename_pattern="model{suffix}.safetensors", max_shard_size=max_shard_size
        )
    except ValueError as error:
        raise ModelError(f"max_shard_size = {max_shard_size!r} is no size: 500MB or 5GB would do") from error
    values = ((name, lazy.read().to(dtypes[name])) for name, lazy in published.items())

    def write() -> None:
        refuse_full(directory.parent, split.metadata["total_size"])
        write_config(directory, plain, config, dtypes)
        if tokenizer is not None:
            copy_tokenizer(Path(tokenizer), directory, chat_template)
        files = {file: {n: metas[n] for n in names} for file, names in split.filename_to_tensors.items()}
        for path in directory.iterdir():
            seal(path)
        write_safetensors(directory, files, values, seal)
        if split.is_sharded:
            metadata = {
                "total_parameters": sum(tensor.numel() for tensor in metas.values()),
                **split.metadata,
            }
            index = {"metadata": metadata, "weight_map": split.tensor_to_filename}
            text = json.dumps(index, indent=2, sort_keys=True) + "\n"
            (directory / INDEX).write_text(text, encoding="utf-8")
            seal(directory / INDEX)
        sync(directory)

    # Reading is collective, also where the disk has refused on rank 0.
    on_first_rank(write, directory, then=lambda: deque(values, maxlen=0))


def check_names(plain: PreTrainedModel, tensors: Mapping[str, torch.Tensor | LazyTensor]) -> None:
    """Refuse tensors that are not those of `plain`, a model on meta, by names and shapes; tied ones may be left out.

    Raises:
        ModelError: with the first that differ.
    """
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    tied = plain.all_tied_weights_keys
    # Of tied weights one is enough.
    optional = {name for pair in tied.items() if shapes.keys() & set(pair) for name in pair} - shapes.keys()
    expected: dict[str, torch.Tensor] = plain.state_dict()
    wanted = {name: tensor.shape for name, tensor in expected.items() if name not in optional}
    if differing := differences(shapes, wanted):
        raise ModelError(f"these are not the weights of a {type(plain).__name__} of its config: {differing}")


def _published(plain: PreTrainedModel, tensors: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """Return the tensors by their published names, tied ones once; refuse those of another model, on every rank."""
    check_names(plain, tensors)
    kept, copies = once(tensors, plain.all_tied_weights_keys)
    check_copies(copies, kept, plain.all_tied_weights_keys, f"the {type(plain).__name__} to save")
    return to_published(plain, kept)
