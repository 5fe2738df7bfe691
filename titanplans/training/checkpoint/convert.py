"""`titanplans import`: convert a Hugging Face folder to a distributed checkpoint, on a CPU, one tensor at a time."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import WriteItem

from titanplans import disk, kernels, modeling
from titanplans.errors import ConfigError, NotSaved
from titanplans.precision.kept_dtypes import keeps_float32
from titanplans.training.checkpoint import folder as folders
from titanplans.training.checkpoint.manifest import Manifest
from titanplans.training.checkpoint.match import compared_fields
from titanplans.training.checkpoint.multi_token import find_layers
from titanplans.training.checkpoint.storage import CheckpointWriter, cause_of
from titanplans.training.checkpoint.weights import hf_folder_weights
from titanplans.weights.files import refuse_full
from titanplans.weights.lazy import LazyTensor


def import_folder(
    folder: Path, checkpoint: Path, *, config: str | None = None, dtype: str | None = None
) -> str:
    """Write a Hugging Face folder as a distributed checkpoint of step 0 (a seed); return a sentence about the checkpoint.

    Args:
        folder: the Hugging Face folder, with safetensors files and config.json.
        checkpoint: the folder to write, which must not exist. Its name must not be step-N, except step-0.
        config: a config.json, or a folder with a config.json; None: the config.json in `folder`.
        dtype: dtype of the floating-point tensors; None: unchanged.

    Raises:
        ConfigError, ModelError: the folder is damaged, or holds another model.
        NotSaved: the disk is full, or refuses to write.
    """
    if re.fullmatch(r"step-[0-9]+", checkpoint.name) and checkpoint.name != "step-0":
        raise ConfigError(f"import: {checkpoint} would be a checkpoint of another step; name it step-0")
    kernels.install("cpu")
    hf_config = modeling.load_config_file(config or folder)
    plain = modeling.build(hf_config)
    tensors = hf_folder_weights(plain, folder, f"import {folder}")
    to_dtype = None if dtype is None else getattr(torch, dtype)
    planner = _LazyPlanner(tensors, to_dtype, keeps_float32(plain, to_dtype))
    state = planner.meta_tensors
    layers = find_layers(folder, plain)
    writer = CheckpointWriter(checkpoint, Manifest(0, "weights", compared_fields(hf_config), {}, {}), layers)
    writer.single_file_per_rank = False  # torch holds all tensors of a file in memory until it is written
    writing = folders.writing_path(checkpoint)
    try:
        writing.mkdir(parents=True)
        needed = sum(tensor.nbytes for tensor in state.values())
        refuse_full(checkpoint.parent, needed + (0 if layers is None else layers.nbytes))
        dcp.save(state, storage_writer=writer, planner=planner, no_dist=True)
    except FileExistsError as error:
        raise ConfigError(
            f"import: {writing} exists: another process is writing it, or was killed while it wrote it; if no process is "
            "writing it, remove it"
        ) from error
    except (CheckpointException, OSError, NotSaved) as error:
        shutil.rmtree(writing, ignore_errors=True)
        cause = cause_of(error) if isinstance(error, CheckpointException) else error
        if isinstance(cause, OSError):
            raise NotSaved(
                f"{cause.filename or checkpoint} can't be written ({disk.reason(cause)})"
            ) from error
        raise cause from error
    return (
        f"{checkpoint}: {describe_size(checkpoint)}; a job starts from it with checkpoint.initial_load_path"
        f"{'' if layers is None else f'; {layers.describe()}'}"
    )


def describe_size(folder: Path) -> str:
    """Return the size and number of a folder's files: "1.234 GB in 5 files"."""
    sizes = [path.stat().st_size for path in folder.iterdir()]
    return f"{sum(sizes) / 1e9:,.3f} GB in {len(sizes)} files"


class _LazyPlanner(DefaultSavePlanner):
    """Reads and casts each tensor only when it is saved.

    Args:
        tensors: the tensors by name.
        dtype: the dtype that floating-point tensors are cast to; None: they are not cast.
        keeps_dtype: returns whether the tensor of a name is exempt from the cast.

    Attributes:
        meta_tensors: the state dict to save, on meta.
    """

    def __init__(
        self, tensors: dict[str, LazyTensor], dtype: torch.dtype | None, keeps_dtype: Callable[[str], bool]
    ):
        super().__init__()
        self._tensors = tensors
        cast_names = {
            name
            for name, t in tensors.items()
            if dtype and t.dtype.is_floating_point and not keeps_dtype(name)
        }
        self.meta_tensors = {
            name: torch.empty(t.shape, dtype=dtype if name in cast_names else t.dtype, device="meta")
            for name, t in tensors.items()
        }

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        name = write_item.index.fqn
        return self._tensors[name].read().to(self.meta_tensors[name].dtype)
