"""A model as a Hugging Face folder: published names, safetensors of a chosen size, config.json and tokenizer beside them.

Headers are known before a value is, so each tensor is gathered, written to its place and forgotten. The folder is written
beside its place, `.NAME.writing`, brought to the disk, and renamed when it is whole.
"""

import copy
import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from titanplans.errors import ModelError, NotSaved
from titanplans.modeling.build import build
from titanplans.modeling.weights.folder import DTYPES, INDEX
from titanplans.modeling.weights.gather import from_first, rank, stored, whole
from titanplans.modeling.weights.lazy import Box, LazyTensor
from titanplans.modeling.weights.names import to_published

_TOKENIZER = (
    *(
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "tokenizer.model",
    ),
    *(
        "spiece.model",
        "sentencepiece.bpe.model",
        "vocab.json",
        "vocab.txt",
        "merges.txt",
        "chat_template.jinja",
    ),
    *("chat_template.json", "preprocessor_config.json", "processor_config.json", "generation_config.json"),
)
"""What belongs to a tokenizer, and how a model is asked to generate."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_SHOWN = 3


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

    Rank 0 has one whole tensor on the CPU at a time, and each rank has it on its device.

    Args:
        model: of transformers or FLA, as `titanplans.modeling.build` or the library made it.
        folder: is not there yet, or empty.
        dtype: of all floating-point tensors; None leaves each as it is.
        max_shard_size: bytes of a file at most, or with a unit, "500MB"; a larger tensor has a file of its own.
        tokenizer: a folder whose tokenizer files are copied, if there is one.
        config: what config.json says; None for the model's own, which generates with a cache.

    Raises:
        ModelError: on every rank: the folder is there, or the model holds what transformers does not know.
        NotSaved: on every rank: the disk is full, or refuses. What was written is removed.
    """
    if config is None:
        config = copy.deepcopy(model.config)  # pyrefly: ignore
        text = config.get_text_config()
        if hasattr(text, "use_cache"):
            text.use_cache = True  # `build` has switched it off
    tensors, _ = stored(model)
    target = Path(folder)
    lazy = lazily(tensors, lambda name: whole(tensors[name]))
    with written_beside(target) as directory:
        write_folder(directory, config, lazy, dtype=dtype, max_shard_size=max_shard_size, tokenizer=tokenizer)


def lazily(tensors: Mapping[str, torch.Tensor], read: Callable[[str], torch.Tensor]) -> dict[str, LazyTensor]:
    """Return tensors that `read(name)` gives whole; the last one is kept, of which parts may be asked for one by one.

    Args:
        tensors: shapes and dtypes; may lie on meta.
        read: returns the values, or on a rank that does not write a tensor on meta.
    """
    last: dict[str, torch.Tensor] = {}

    def lazy(name: str, tensor: torch.Tensor) -> LazyTensor:
        def fetch(box: Box) -> torch.Tensor:
            if name not in last:
                last.clear()
                last[name] = read(name)
            return last[name][tuple(slice(*bounds) for bounds in box)]

        return LazyTensor(name, tensor.shape, tensor.dtype, fetch)

    return {name: lazy(name, tensor) for name, tensor in tensors.items()}


def write_folder(
    directory: Path,
    config: PretrainedConfig,
    tensors: Mapping[str, LazyTensor],
    *,
    dtype: torch.dtype | None,
    max_shard_size: int | str,
    tokenizer: str | os.PathLike[str] | None,
) -> None:
    """Write all files of a model into `directory`, and bring them to the disk. Collective if reading `tensors` is.

    Args:
        directory: there and empty, on rank 0.
        config: the model's.
        tensors: name in the module tree -> tensor. Tied ones may be there under each name, and must be equal then.
        dtype, max_shard_size, tokenizer: as for `save_weights`.

    Raises:
        ModelError, NotSaved: as `save_weights` does, which removes nothing here.
    """
    plain = build(config)
    published = _published(plain, tensors)
    dtypes = {
        name: dtype if dtype and t.dtype.is_floating_point else t.dtype for name, t in published.items()
    }
    metas = {name: torch.empty(t.shape, dtype=dtypes[name], device="meta") for name, t in published.items()}
    try:
        split = split_torch_state_dict_into_shards(
            metas, filename_pattern="model{suffix}.safetensors", max_shard_size=max_shard_size
        )
    except ValueError as error:
        raise ModelError(f"max_shard_size = {max_shard_size!r} is no size: 500MB or 5GB would do") from error
    values = ((name, lazy.read().to(dtypes[name])) for name, lazy in published.items())
    failed: Exception | None = None
    if rank() == 0:
        try:
            _refuse_full(directory, split.metadata["total_size"])
            files = {file: {n: metas[n] for n in names} for file, names in split.filename_to_tensors.items()}
            _write_safetensors(directory, files, values)
            if split.is_sharded:
                total = sum(tensor.numel() for tensor in metas.values())
                index = {
                    "metadata": {"total_parameters": total, **split.metadata},
                    "weight_map": split.tensor_to_filename,
                }
                (directory / INDEX).write_text(
                    json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8"
                )
            _write_config(directory, plain, config, dtypes)
            if tokenizer is not None:
                _copy_tokenizer(Path(tokenizer), directory)
            for path in directory.iterdir():
                _sync(path)
            _sync(directory)
        except (OSError, ModelError, NotSaved) as error:
            failed = error
    for _ in values:
        pass  # the others read to the end: reading is collective
    _raise_alike(failed, directory)


@contextmanager
def written_beside(target: Path) -> Iterator[Path]:
    """Give the body a new folder beside `target`, which gets its name once the body is done. Collective.

    Raises:
        ModelError: on every rank: there is something at `target`, or beside it from a process that writes, or was killed.
        NotSaved: on every rank: the system refuses.
    """
    directory = target.with_name(f".{target.name}.writing")
    failed: Exception | None = None
    if rank() == 0:
        try:
            _refuse_existing(target, directory)
            directory.mkdir(parents=True)
        except (OSError, ModelError) as error:
            failed = error
    _raise_alike(failed, target)
    try:
        yield directory
        if rank() == 0:
            try:
                directory.rename(target)
                _sync(target.parent)
            except OSError as error:
                failed = error
        _raise_alike(failed, target)
    except BaseException:
        if rank() == 0:
            shutil.rmtree(directory, ignore_errors=True)
        raise


def _refuse_existing(target: Path, directory: Path) -> None:
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise ModelError(f"{target} is there already, and nothing is written over: name a new folder")
    if directory.exists():
        raise ModelError(
            f"{directory} is there: another process writes {target}, or one was killed while it did; if so, remove it"
        )


def _published(plain: PreTrainedModel, tensors: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """Return the tensors by their published names, tied ones once.

    Raises:
        ModelError: on every rank: they are not those of the model that the config describes.
    """
    expected: dict[str, torch.Tensor] = plain.state_dict()
    once = dict(tensors)
    for name, source in plain.all_tied_weights_keys.items():
        if name not in once:
            continue
        other = once.pop(name)
        if source not in once:
            once[source] = other
            continue
        one, two = other.read(), once[source].read()  # on every rank: reading may be collective
        if from_first(rank() == 0 and not torch.equal(one, two)):
            raise ModelError(
                f"{name} and {source} have other values, and the model's config ties the two: tie_word_embeddings = false "
                "in it keeps both"
            )
    shapes = {name: tensor.shape for name, tensor in once.items()}
    wanted = {n: t.shape for n, t in expected.items() if n in once or n not in plain.all_tied_weights_keys}
    wrong = [
        f"{name} is {_shape(shapes, name)}, expected {_shape(wanted, name)}"
        for name in {**wanted, **shapes}
        if shapes.get(name) != wanted.get(name)
    ]
    if wrong:
        more = f", and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise ModelError(
            f"what is saved is no {type(plain).__name__} of its config: {'; '.join(wrong[:_SHOWN])}{more}"
        )
    return to_published(plain, once)


def _shape(shapes: Mapping[str, torch.Size], name: str) -> object:
    return tuple(shapes[name]) if name in shapes else "not there"


def _write_safetensors(
    directory: Path,
    files: Mapping[str, Mapping[str, torch.Tensor]],
    values: Iterator[tuple[str, torch.Tensor]],
) -> None:
    """Write files whose tensors are known by shape and dtype, and whose values come in any order.

    A file: 8 bytes with the length of the header, the header in JSON, the values in the order of the header
    (https://github.com/huggingface/safetensors#format).
    """
    with ExitStack() as stack:
        places = {}
        for file, tensors in files.items():
            # Large elements first, so that each begins at a multiple of its size.
            names = sorted(tensors, key=lambda name: -tensors[name].itemsize)
            header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
            end = 0
            for name in names:
                start, end = end, end + tensors[name].nbytes
                shape, dtype = list(tensors[name].shape), _NAMES[tensors[name].dtype]
                header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
            text = json.dumps(header, separators=(",", ":")).encode()
            text += b" " * (-len(text) % 8)
            stream = stack.enter_context((directory / file).open("wb"))
            stream.write(len(text).to_bytes(8, "little") + text)
            places |= {name: (stream, 8 + len(text) + header[name]["data_offsets"][0]) for name in names}
        for name, value in values:
            stream, offset = places[name]
            stream.seek(offset)
            if value.numel():
                stream.write(value.contiguous().view(-1).view(torch.uint8).numpy())


def _write_config(
    directory: Path, plain: PreTrainedModel, config: PretrainedConfig, dtypes: Mapping[str, torch.dtype]
) -> None:
    """Write config.json, with the class that `from_pretrained` makes and the dtype of its weights."""
    config = copy.deepcopy(config)
    config.architectures = [type(plain).__name__]
    dtype = next(dtype for dtype in dtypes.values() if dtype.is_floating_point)
    for each in (config, *(getattr(config, name) for name in config.sub_configs)):
        if isinstance(each, PretrainedConfig):
            each.dtype = str(dtype).removeprefix("torch.")
    config.save_pretrained(directory)


def _copy_tokenizer(source: Path, directory: Path) -> None:
    found = [source / name for name in _TOKENIZER if (source / name).is_file()]
    if not found:
        raise ModelError(
            f"tokenizer = {str(source)!r}: there is no tokenizer.json and no other file of a tokenizer in it"
        )
    for path in found:
        shutil.copyfile(path, directory / path.name)


def _refuse_full(directory: Path, needed: int) -> None:
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise NotSaved(
            f"{directory.parent} has {free / 1e9:,.2f} GB free, and the weights take {needed / 1e9:,.2f} GB"
        )


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _raise_alike(failed: Exception | None, path: Path) -> None:
    """Raise on every rank what has failed on rank 0."""
    what = None if failed is None else (type(failed) is ModelError, str(failed))
    if isinstance(failed, OSError):
        reason = "no space is left" if failed.errno == errno.ENOSPC else failed.strerror
        what = False, f"{failed.filename or path} can't be written ({reason})"
    if (what := from_first(what)) is not None:
        is_users, words = what
        raise (ModelError if is_users else NotSaved)(words) from failed
