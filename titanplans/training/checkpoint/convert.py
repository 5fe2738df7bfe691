"""`titanplans import`: a Hugging Face folder to a distributed checkpoint; in one process, on a CPU, tensor by tensor."""

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
from titanplans.training.checkpoint.card import Card
from titanplans.training.checkpoint.match import model_card
from titanplans.training.checkpoint.storage import CheckpointWriter, cause_of
from titanplans.training.checkpoint.weights import of_folder
from titanplans.weights.files import refuse_full
from titanplans.weights.lazy import LazyTensor


def import_folder(
    folder: Path, checkpoint: Path, *, config: str | None = None, dtype: str | None = None
) -> str:
    """Write a Hugging Face folder as a distributed checkpoint of step 0, a seed; return a sentence about it.

    Args:
        folder: safetensors, and config.json.
        checkpoint: is not there yet; its name is step-0, or anything but step-N.
        config: a config.json, or the folder of one; None for the folder's.
        dtype: of the floating-point tensors; None for the folder's.

    Raises:
        ConfigError, ModelError: the folder is damaged or of another model.
        NotSaved: the disk is full, or refuses.
    """
    if re.fullmatch(r"step-[0-9]+", checkpoint.name) and checkpoint.name != "step-0":
        raise ConfigError(f"import: {checkpoint} would be a checkpoint of another step; name it step-0")
    kernels.install("cpu")
    hf_config = modeling.load_config_file(config or folder)
    plain = modeling.build(hf_config)
    tensors = of_folder(plain, folder, f"import {folder}")
    to = None if dtype is None else getattr(torch, dtype)
    planner = _LazyPlanner(tensors, to, keeps_float32(plain, to))
    state = planner.described
    writer = CheckpointWriter(checkpoint, Card(0, "weights", model_card(hf_config), {}, {}))
    writer.single_file_per_rank = False  # torch keeps all tensors of a file until it is written
    writing = folders.writing_path(checkpoint)
    try:
        writing.mkdir(parents=True)
        refuse_full(checkpoint.parent, sum(tensor.nbytes for tensor in state.values()))
        dcp.save(state, storage_writer=writer, planner=planner, no_dist=True)
    except FileExistsError as error:
        raise ConfigError(
            f"import: {writing} exists: another process is writing it, or was killed; in that case remove it"
        ) from error
    except (CheckpointException, OSError, NotSaved) as error:
        shutil.rmtree(writing, ignore_errors=True)
        cause = cause_of(error) if isinstance(error, CheckpointException) else error
        if isinstance(cause, OSError):
            said = f"{cause.filename or checkpoint} can't be written ({disk.reason(cause)})"
            raise NotSaved(said) from error
        raise cause from error
    return f"{checkpoint}: {size_of(checkpoint)}; a job starts from it by checkpoint.initial_load_path"


def size_of(folder: Path) -> str:
    """Return in words how large a folder's files are."""
    sizes = [path.stat().st_size for path in folder.iterdir()]
    return f"{sum(sizes) / 1e9:,.3f} GB in {len(sizes)} files"


class _LazyPlanner(DefaultSavePlanner):
    """Reads each tensor as it is saved, and casts it to `dtype` unless it is `kept` in its own."""

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
