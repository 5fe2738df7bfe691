"""Whether a checkpoint belongs to the job's model: by `model.json` in its folder, and by the shapes in it.

Loading a checkpoint into another model fails on every rank deep in a planner, or, where only heads or norms differ, not at
all. These checks refuse it before a process group exists.
"""

import json
import os
import re
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from transformers import PretrainedConfig, PreTrainedModel

from titanplans.config import ConfigError
from titanplans.config.values import show
from titanplans.training.reading import refusing

CARD = "model.json"

# What torchtitan saves beside the weights, whose names have no prefix.
_OTHER_STATES = ("optimizer", "lr_scheduler", "dataloader", "train_state")

_STEP = re.compile(r"step-(\d+)")
# Keys that say nothing about the model's weights or results.
_INCIDENTAL = {
    "_name_or_path", "architectures", "attn_mode", "chunk_size_feed_forward", "dtype", "initializer_range",
    "output_attentions", "output_hidden_states", "return_dict", "torch_dtype", "transformers_version", "use_cache",
}  # fmt: skip


def write_model_card(folder: str | Path, hf_config: PretrainedConfig) -> None:
    """Write `model.json` to `folder`, whole or not at all. One rank calls it, before training."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f".{CARD}.{os.getpid()}"
    partial.write_text(json.dumps(_essence(hf_config), indent=2, sort_keys=True) + "\n", encoding="utf-8")
    partial.replace(folder / CARD)


def check_model_card(folder: str | Path, hf_config: PretrainedConfig, key: str = "checkpoint.folder") -> None:
    """Refuse a folder whose `model.json` is another model's; a folder without one passes.

    `key` is the job's key for the folder, used in the message.

    Raises:
        ConfigError: the card differs; the message names the keys with both values.
    """
    card = Path(folder) / CARD
    if not card.is_file():
        return
    try:
        theirs, ours = json.loads(card.read_text(encoding="utf-8")), _essence(hf_config)
    except (ValueError, RecursionError) as error:  # not JSON, or not UTF-8
        raise ConfigError(
            f"{key}: {card} is not JSON ({error}); remove it, and the shapes alone are compared"
        ) from error
    if not isinstance(theirs, dict):
        raise ConfigError(f"{key}: {card} is no model's; remove it, and the shapes alone are compared")
    differing = [key for key in sorted(theirs | ours) if theirs.get(key) != ours.get(key)]
    if differing:
        shown = [f"{key} = {_show(theirs.get(key))}, now {_show(ours.get(key))}" for key in differing[:5]]
        more = f" and {len(differing) - 5} more keys" if len(differing) > 5 else ""
        raise ConfigError(
            f"{key}: {folder} holds checkpoints of another model ({'; '.join(shown)}{more}); "
            "name another checkpoint.folder or job.dump_folder, or go back to that model"
        )


def check_saved(checkpoint: Path, model: PreTrainedModel, key: str, *, resumes: bool) -> None:
    """Refuse a distributed checkpoint (a step-N folder) that is of another model, or that training can't be resumed from.

    Args:
        checkpoint: the folder that holds `.metadata`; the model's card lies beside it.
        model: its weights are compared by name and shape; may lie on meta.
        key: the key of the job that leads to it, for the message.
        resumes: whether the job takes more of it than the weights.

    Raises:
        ConfigError: with the first weight that does not fit; or it was the last one of a run under last_save_model_only.
    """
    check_model_card(checkpoint.parent, model.config, key)
    with refusing(f"{key}: {checkpoint} has a damaged .metadata", "remove the folder", ConfigError):
        saved = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    there = {
        name: list(entry.size) if isinstance(entry, TensorStorageMetadata) else None
        for name, entry in saved.items()
        if name.partition(".")[0] not in _OTHER_STATES
    }
    here = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    for name in [*here, *there]:
        if here.get(name) != there.get(name):
            raise ConfigError(
                f"{key}: {checkpoint} is of another model: {name} is {there.get(name) or 'not there'} in it, and "
                f"{here.get(name) or 'not there'} in this one; name another folder, or go back to that model"
            )
    if resumes and not any(name.startswith("train_state") for name in saved):
        raise ConfigError(
            f"{key}: {checkpoint} holds only the weights (checkpoint.last_save_model_only), so training can't be resumed "
            "from it; resume from an earlier one by checkpoint.load_step, or start a new checkpoint.folder with it as "
            "checkpoint.initial_load_path"
        )


def find_checkpoint(folder: str | Path, step: int = -1) -> Path | None:
    """Return the newest complete step-N folder, or that of `step`; None where there is none."""
    steps = {
        int(match.group(1)): path
        for path in Path(folder).glob("step-*")
        if (match := _STEP.fullmatch(path.name)) and (path / ".metadata").is_file()
    }
    return steps.get(max(steps, default=-1) if step == -1 else step)


def _essence(hf_config: PretrainedConfig) -> dict[str, Any]:
    values = json.loads(hf_config.to_json_string(use_diff=False))
    return {
        key: value for key, value in values.items() if key not in _INCIDENTAL and not key.startswith("fuse_")
    }


def _show(value: Any) -> str:
    return "unset" if value is None else show(value)
