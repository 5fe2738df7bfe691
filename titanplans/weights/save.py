"""`save_weights`: save a split model as a Hugging Face folder of safetensors files, config.json and a tokenizer.

The headers of the files are written first. Then each tensor is gathered, written at its offset, and freed.
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
from titanplans.hub import repository_of
from titanplans.modeling.build import build
from titanplans.precision.kept_dtypes import keeps_float32
from titanplans.weights.atomic import on_first_rank, written_atomically
from titanplans.weights.compare import check_tied_copies, differences, unify_tied
from titanplans.weights.files import copy_tokenizer, refuse_full, write_config, write_safetensors
from titanplans.weights.folder import INDEX
from titanplans.weights.lazy import LazyTensor, lazy_tensors
from titanplans.weights.merged import full_tensors
from titanplans.weights.names import to_hf_names


def save_weights(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    tokenizer: str | os.PathLike[str] | None = None,
    config: PretrainedConfig | None = None,
) -> None:
    """Save a split or unsplit model as a folder for transformers' `from_pretrained`. Collective; rank 0 writes.

    Adapters are merged into their weights; `save_adapter` saves them separately. Each rank needs memory for one full tensor
    on its device, and rank 0 also on the CPU. The files are written to a temporary folder, which is renamed when it is
    complete. Errors are raised on every rank.

    Args:
        model: a model of transformers or FLA, built by `titanplans.modeling.build` or by the library.
        folder: the folder to write, which must not exist or must be empty. "owner/name" is a local path here.
        dtype: dtype of the floating-point tensors, except those that the model keeps in float32; None: unchanged.
        max_shard_size: largest size of a file, in bytes or in the form "500MB"; a larger tensor gets a separate file.
        tokenizer: a folder whose tokenizer files are copied; None: none are copied.
        config: the config to write; None: the model's, with use_cache = True.

    Raises:
        ModelError: the folder exists or is "owner/name@revision", or the model has tensors that its class does not have.
        NotSaved: the disk is full, or refuses to write. Written files are removed.
    """
    repository = repository_of(str(folder))
    if repository is not None and repository.revision is not None:
        raise ModelError(
            f"save_weights(model, {str(folder)!r}): this is a revision of a repository of the Hub, but only local folders "
            f"are written; name a folder, such as './{folder}', and push it with hf upload {repository.name} FOLDER"
        )
    config = _config_with_cache(model) if config is None else config
    target = Path(folder)
    tensors = full_tensors([model])
    with written_atomically(target) as directory:
        write_folder(
            directory, config, tensors, dtype=dtype, max_shard_size=max_shard_size, tokenizer=tokenizer
        )


def _config_with_cache(model: nn.Module) -> PretrainedConfig:
    """Return the model's config with use_cache = True, which `build` sets to False for training."""
    config = copy.deepcopy(getattr(model, "config", None))
    if not isinstance(config, PretrainedConfig):
        raise ModelError(
            f"{type(model).__name__} has no config of transformers, so no config.json can be written: save the result of "
            "titanplans.gather_full_state_dict(model) on rank 0"
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
    others: Mapping[str, LazyTensor] | None = None,
    seal: Callable[[Path], None] = sync,
) -> None:
    """Write all files of a model into `directory`, and sync them to the disk. Collective if reading `tensors` is.

    Args:
        directory: an existing, empty folder on rank 0.
        config: the model's config.
        tensors: the tensors by parameter name. A tied tensor may occur under several names, with equal values.
        dtype, max_shard_size, tokenizer: see `save_weights`.
        chat_template: Jinja that replaces the tokenizer's template.
        others: on rank 0, tensors that the model's class does not have, by their names in the folder; their dtypes are kept.
        seal: called on rank 0 with each complete file, to sync it to the disk.

    Raises:
        ModelError, NotSaved: like `save_weights`, but written files stay.
    """
    plain = build(config)
    # One tensor may become several tensors in the folder. It is gathered once, and cached while these are read.
    hf_tensors = _to_folder_tensors(plain, lazy_tensors(tensors, lambda name: tensors[name].read()))
    stays_float32 = keeps_float32(plain, dtype)
    dtypes = {
        name: dtype if dtype and t.dtype.is_floating_point and not stays_float32(t.name) else t.dtype
        for name, t in hf_tensors.items()
    }
    all_tensors = hf_tensors | dict(others or {})
    all_dtypes = {name: dtypes.get(name, t.dtype) for name, t in all_tensors.items()}
    meta_tensors = {
        name: torch.empty(t.shape, dtype=all_dtypes[name], device="meta") for name, t in all_tensors.items()
    }
    try:
        shards = split_torch_state_dict_into_shards(
            meta_tensors, filename_pattern="model{suffix}.safetensors", max_shard_size=max_shard_size
        )
    except ValueError as error:
        raise ModelError(
            f"max_shard_size = {max_shard_size!r} is not a size; 500MB or 5GB would be"
        ) from error
    values = ((name, lazy.read().to(all_dtypes[name])) for name, lazy in all_tensors.items())

    def write() -> None:
        refuse_full(directory.parent, shards.metadata["total_size"])
        write_config(directory, plain, config, dtypes)
        if tokenizer is not None:
            copy_tokenizer(Path(tokenizer), directory, chat_template)
        files = {
            file: {name: meta_tensors[name] for name in names}
            for file, names in shards.filename_to_tensors.items()
        }
        for path in directory.iterdir():
            seal(path)
        write_safetensors(directory, files, values, seal)
        if shards.is_sharded:
            metadata = {
                "total_parameters": sum(tensor.numel() for tensor in meta_tensors.values()),
                **shards.metadata,
            }
            index = {"metadata": metadata, "weight_map": shards.tensor_to_filename}
            text = json.dumps(index, indent=2, sort_keys=True) + "\n"
            (directory / INDEX).write_text(text, encoding="utf-8")
            seal(directory / INDEX)
        sync(directory)

    # Reading a tensor is collective, so every rank must read all tensors, even rank 0 if it could not write.
    on_first_rank(write, directory, then=lambda: deque(values, maxlen=0))


def check_names(plain: PreTrainedModel, tensors: Mapping[str, torch.Tensor | LazyTensor]) -> None:
    """Refuse tensors whose names and shapes differ from those of `plain`, a model on meta.

    Of several tied weights, one is enough.

    Raises:
        ModelError: names the first tensors that differ.
    """
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    tied = plain.all_tied_weights_keys
    optional = {name for pair in tied.items() if shapes.keys() & set(pair) for name in pair} - shapes.keys()
    state: dict[str, torch.Tensor] = plain.state_dict()
    expected = {name: tensor.shape for name, tensor in state.items() if name not in optional}
    if changes := differences(shapes, expected):
        raise ModelError(f"these are not the weights of a {type(plain).__name__} with this config: {changes}")


def _to_folder_tensors(plain: PreTrainedModel, tensors: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """Return the tensors by their names in a folder, with one tensor for each group of tied tensors; refuse another
    model's tensors."""
    check_names(plain, tensors)
    unified, copies = unify_tied(tensors, plain.all_tied_weights_keys)
    check_tied_copies(copies, unified, plain.all_tied_weights_keys, f"the {type(plain).__name__} to save")
    return to_hf_names(plain, unified)
