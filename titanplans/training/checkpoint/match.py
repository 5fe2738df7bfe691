"""Whether a checkpoint belongs to the job, before a process group exists.

Loading a checkpoint into another model fails on every rank deep in a planner, or, where only heads or norms differ, not at
all. The model's config is in the card; a checkpoint without a card, torchtitan's, is compared by its shapes.
"""

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic_core import to_jsonable_python
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from transformers import PretrainedConfig, PreTrainedModel

from titanplans.adapters.low_rank import adapted
from titanplans.config import ConfigError, JobConfig
from titanplans.config.schema import keys
from titanplans.config.translate import flatten
from titanplans.parallel.optimizers.build import ParameterGroup
from titanplans.split.adapted import is_factor
from titanplans.training.checkpoint import folder
from titanplans.training.checkpoint.card import CARD, Card, changes, damage, is_config, read_card
from titanplans.training.checkpoint.storage import CheckpointReader
from titanplans.weights.adapters import trained_names
from titanplans.weights.compare import differences

# States that torchtitan saves with the weights, whose names have no prefix.
_OTHER_STATES = ("optimizer", "lr_scheduler", "dataloader", "train_state")

# Keys that say nothing about the model's weights or results.
_INCIDENTAL = {
    "_name_or_path", "architectures", "attn_mode", "chunk_size_feed_forward", "dtype", "initializer_range",
    "output_attentions", "output_hidden_states", "return_dict", "torch_dtype", "transformers_version", "use_cache",
}  # fmt: skip

_RESULT = re.compile(
    r"(lora|data|optimizer|lr_scheduler|loss|quantize)\..*|training\.(?!steps|gc_|dataloader).*|debug\.seed|"
    r"model\.hf_assets_path|checkpoint\.initial_.*"
)
"""Keys of a job, but for its model's and its length, that decide what it learns."""


def model_card(hf_config: PretrainedConfig) -> dict[str, Any]:
    """Return the values of a config that two models must share to share weights: `Card.model`."""
    return _of_weights(json.loads(hf_config.to_json_string(use_diff=False)))


def _of_weights(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a config that say something about weights or results; in the configs of its parts, too."""
    return {
        key: _of_weights(value) if is_config(value, key) else value
        for key, value in values.items()
        if key not in _INCIDENTAL and not key.startswith("fuse_")
    }


def other_model(
    theirs: Mapping[str, Any], ours: PretrainedConfig, but: Collection[str] = (), *, token_ids: bool = True
) -> str:
    """Return how the model of the card `theirs` differs from that of `ours`, as `changes` does.

    Args:
        but: fields that may differ.
        token_ids: whether ids of special tokens count.
    """
    before, now = (
        _of_weights(theirs),
        model_card(ours),
    )  # an earlier version's card has more of a part's config
    ids = {key for key in (*_keys(before), *_keys(now)) if key.endswith("token_id")}
    return changes(before, now, {*but, *(() if token_ids else ids)})


def _keys(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield the keys of a config and of the configs in it."""
    for key, value in values.items():
        yield key
        if is_config(value, key):
            yield from _keys(value)


def job_values(job: JobConfig) -> dict[str, Any]:
    """Return the job's values by dotted key: `Card.job`."""
    return dict(flatten(job.to_dict(exclude_none=True)))


def check_finished(last: Path, job: JobConfig) -> None:
    """Refuse a job that would learn something else than the one that has finished in its folder.

    Raises:
        ConfigError: with the keys that differ.
    """
    card = read_card(last).job
    decide = {
        name: to_jsonable_python(key.default) for name, key in keys().items() if _RESULT.fullmatch(name)
    }
    theirs, ours = (
        {key: values.get(key, decide[key]) for key in decide} for values in (card, job_values(job))
    )
    if card and (differing := changes(theirs, ours)):
        raise ConfigError(
            f"checkpoint.folder: {last} is the end of a finished job with other options ({differing}); name another "
            "job.dump_folder to train this one, or return to those"
        )


def check_saved(
    checkpoint: Path, model: PreTrainedModel, key: str, *, resumes: bool, overrides: Collection[str] = ()
) -> None:
    """Refuse a distributed checkpoint (a step-N folder) that is of another model, or that training can't be resumed from.

    Args:
        model: its weights are compared by name and shape; may lie on meta.
        key: the key of the job that leads to it, for the message.
        resumes: whether the job takes more of it than the weights.
        overrides: fields of the model's config in which it may differ.

    Raises:
        ConfigError: with what differs; or it holds the weights alone.
    """
    card, in_hf, saved = None, False, {}
    if (checkpoint / CARD).is_file():
        if (wrong := damage(checkpoint, names=(".metadata",))) is not None:
            raise damaged(checkpoint, key, wrong)
        card = read_card(checkpoint)
        in_hf = ".metadata" not in card.files
    if not in_hf:
        index = CheckpointReader(checkpoint).read_metadata()
        saved = index.state_dict_metadata
        if (wrong := truncated(checkpoint, index)) is not None:
            raise damaged(checkpoint, key, wrong)
    differing = other_model(card.model, model.config, overrides) if card is not None else ""
    if not differing and not in_hf:
        differing = _other_shapes(saved, model, card, own=key == "checkpoint.folder")
    if differing:
        raise ConfigError(
            f"{key}: {checkpoint} is of another model ({differing}); name another folder, or return to that model"
        )
    if resumes and not any(name.startswith("train_state") for name in saved):
        what = (
            "holds no train_state, so training can't be resumed from it"
            if card is None
            else card.weights_alone
        )
        raise ConfigError(
            f"{key}: {checkpoint} {what}; name an earlier one, or take its weights with "
            "checkpoint.initial_load_model_only = true"
        )


def _other_shapes(saved: Mapping[str, Any], model: PreTrainedModel, card: Card | None, *, own: bool) -> str:
    """Return which weights in a checkpoint's index are not the model's, in words; "" if all are."""
    there = {name: tensor.shape for name, tensor in tensors_of(saved).items()}
    here = {name: tensor.shape for name, tensor in model.state_dict().items()}
    if adapted(model):
        if own and card is not None and card.job.get("checkpoint.save_adapters_only"):
            here = {name: here[name] for name in trained_names(model)}
        elif not own and not any(map(is_factor, there)):  # of the model before it got adapters
            here = {name: shape for name, shape in here.items() if not is_factor(name)}
    return differences(there, here)


def tensors_of(saved: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the weights in a checkpoint's index, on meta."""
    return {
        name: torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
        for name, entry in saved.items()
        if isinstance(entry, TensorStorageMetadata) and name.partition(".")[0] not in _OTHER_STATES
    }


def check_optimizer(checkpoint: Path, groups: Iterable[ParameterGroup], key: str) -> None:
    """Refuse a checkpoint whose optimizer state does not match the job's optimizers and their parameters.

    A parameter without any state has not had a gradient, and begins with a new state.

    `key` is that of the job which leads to it, for the message.

    Raises:
        ConfigError: names the first parameter; or there is no state at all.
    """
    saved = CheckpointReader(checkpoint).read_metadata().state_dict_metadata
    if not with_state(saved):
        raise ConfigError(
            f"{key}: {checkpoint} holds no optimizer state; start afresh with "
            'exclude_from_loading = ["optimizer"] in [checkpoint]'
        )
    for group in groups:
        state = "momentum_buffer" if group.optimizer == "Muon" else "exp_avg"
        for name in group.parameters:
            start = f"optimizer.state.{name}."
            other = [entry.removeprefix(start) for entry in saved if entry.startswith(start)]
            if other and state not in other:
                raise ConfigError(
                    f"{key}: {checkpoint} holds {' and '.join(other)} of {name}, and "
                    f"{group.optimizer}, which has it in this job, needs {state}; return to the optimizer of that run, or "
                    'start afresh with exclude_from_loading = ["optimizer"] in [checkpoint]'
                )


def with_state(saved: Iterable[str]) -> set[str]:
    """Return the parameters that have optimizer state in a checkpoint, by the keys of its index."""
    start = "optimizer.state."
    return {key.removeprefix(start).rpartition(".")[0] for key in saved if key.startswith(start)}


def damaged(checkpoint: Path, key: str, wrong: str) -> ConfigError:
    """Return the error of a checkpoint in which `damage` has found something `wrong`."""
    instead = folder.remedy(checkpoint) if key == "checkpoint.folder" else "take another checkpoint"
    return ConfigError(f"{key}: {wrong}; {instead}")


def truncated(checkpoint: Path, index: Metadata) -> str | None:
    """Return which file of a checkpoint is shorter than its index says, in words: one without a card has no checksums."""
    sizes: dict[str, int] = {}
    for entry in (index.storage_data or {}).values():
        sizes[entry.relative_path] = max(sizes.get(entry.relative_path, 0), entry.offset + entry.length)
    for name, size in sizes.items():
        if not (checkpoint / name).is_file() or (checkpoint / name).stat().st_size < size:
            return f"{checkpoint / name} is truncated or missing"
    return None
