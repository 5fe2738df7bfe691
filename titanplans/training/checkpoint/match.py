"""Compare a checkpoint with a job before its ranks start: `check_saved` (the model), `check_optimizer`, `check_finished`.

The model's config is compared with the config in the manifest. Without a manifest, as in torchtitan's checkpoints, only
the names and shapes of the weights are compared.
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
from titanplans.training.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    damage,
    describe_changes,
    is_config,
    read_manifest,
)
from titanplans.training.checkpoint.storage import CheckpointReader
from titanplans.weights.adapters import trained_names
from titanplans.weights.compare import differences

# Prefixes of the states in a checkpoint that are not weights; weights have no prefix.
_OTHER_STATES = ("optimizer", "lr_scheduler", "dataloader", "train_state")

# Fields of a model's config that affect neither its weights nor its results.
_IGNORED_FIELDS = {
    "_name_or_path", "architectures", "attn_mode", "chunk_size_feed_forward", "dtype", "initializer_range",
    "output_attentions", "output_hidden_states", "return_dict", "torch_dtype", "transformers_version", "use_cache",
}  # fmt: skip

_RESULT_OPTIONS = re.compile(
    r"(lora|data|optimizer|lr_scheduler|loss|quantize)\..*|training\.(?!steps|gc_|dataloader).*|debug\.seed|"
    r"model\.hf_assets_path|checkpoint\.initial_.*"
)
"""Options that affect the trained weights, except those of the model and the number of steps."""


def compared_fields(hf_config: PretrainedConfig) -> dict[str, Any]:
    """Return the fields of a config that must be equal if one model's weights are loaded into another: `Manifest.model`."""
    return _without_ignored(json.loads(hf_config.to_json_string(use_diff=False)))


def _without_ignored(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _without_ignored(value) if is_config(value, key) else value
        for key, value in fields.items()
        if key not in _IGNORED_FIELDS and not key.startswith("fuse_")
    }


def describe_model_changes(
    saved: Mapping[str, Any],
    config: PretrainedConfig,
    ignored: Collection[str] = (),
    *,
    token_ids: bool = True,
) -> str:
    """Describe how a saved model differs from the model of `config`, as `describe_changes` does; "" if they are equal.

    Args:
        saved: `Manifest.model`.
        config: the config of the job's model.
        ignored: fields that may differ.
        token_ids: whether the ids of special tokens are compared.
    """
    # Manifests of earlier versions have more fields of nested configs.
    before, now = _without_ignored(saved), compared_fields(config)
    ids = {key for key in (*_all_keys(before), *_all_keys(now)) if key.endswith("token_id")}
    return describe_changes(before, now, {*ignored, *(() if token_ids else ids)})


def _all_keys(fields: Mapping[str, Any]) -> Iterator[str]:
    for key, value in fields.items():
        yield key
        if is_config(value, key):
            yield from _all_keys(value)


def job_values(job: JobConfig) -> dict[str, Any]:
    """Return the job's options by dotted key: `Manifest.job`."""
    return dict(flatten(job.to_dict(exclude_none=True)))


def check_finished(last: Path, job: JobConfig) -> None:
    """Refuse a job whose folder holds a finished job with other options: it would count as finished, and not train.

    Raises:
        ConfigError: names the options that differ.
    """
    saved_values = read_manifest(last).job
    defaults = {
        name: to_jsonable_python(key.default)
        for name, key in keys().items()
        if _RESULT_OPTIONS.fullmatch(name)
    }
    # Options that an earlier version did not have count as their defaults.
    saved, current = (
        {key: values.get(key, default) for key, default in defaults.items()}
        for values in (saved_values, job_values(job))
    )
    if saved_values and (differences := describe_changes(saved, current)):
        raise ConfigError(
            f"checkpoint.folder: {last} is the end of a finished job with other options ({differences}); name another "
            "job.dump_folder to train this job, or return to the options of the finished one"
        )


def check_saved(
    checkpoint: Path, model: PreTrainedModel, key: str, *, resumes: bool, overrides: Collection[str] = ()
) -> None:
    """Refuse a checkpoint of another model, or, if `resumes` is set, a checkpoint without the training state.

    Args:
        checkpoint: a distributed checkpoint, or a Hugging Face folder with a manifest.
        model: the job's model, which may be on meta.
        key: the option that names the checkpoint, for the message.
        resumes: whether the job loads the training state, not only the weights.
        overrides: fields of the model's config that may differ.

    Raises:
        ConfigError: the models differ (names what differs), the checkpoint is damaged, or it holds only weights although
            `resumes` is set.
    """
    # Without this check, a checkpoint of another model fails on every rank deep in torch's planner, or not at all if only
    # heads or norms differ.
    manifest, in_hf, saved = None, False, {}
    if (checkpoint / MANIFEST).is_file():
        if (fault := damage(checkpoint, names=(".metadata",))) is not None:
            raise damaged(checkpoint, key, fault)
        manifest = read_manifest(checkpoint)
        in_hf = ".metadata" not in manifest.files
    if not in_hf:
        index = CheckpointReader(checkpoint).read_metadata()
        saved = index.state_dict_metadata
        if (fault := truncated(checkpoint, index)) is not None:
            raise damaged(checkpoint, key, fault)
    changes = describe_model_changes(manifest.model, model.config, overrides) if manifest is not None else ""
    if not changes and not in_hf:
        changes = _shape_differences(saved, model, manifest, is_own=key == "checkpoint.folder")
    if changes:
        raise ConfigError(
            f"{key}: {checkpoint} is of another model ({changes}); name another folder, or return to that model"
        )
    if resumes and not any(name.startswith("train_state") for name in saved):
        reason = (
            "holds no train_state, so training can't be resumed from it"
            if manifest is None
            else manifest.weights_only_reason
        )
        raise ConfigError(
            f"{key}: {checkpoint} {reason}; name an earlier one, or take its weights with "
            "checkpoint.initial_load_model_only = true"
        )


def _shape_differences(
    saved: Mapping[str, Any], model: PreTrainedModel, manifest: Manifest | None, *, is_own: bool
) -> str:
    """Describe how the weights in a checkpoint's index differ from the model's in names and shapes; "" if they don't."""
    saved_shapes = {name: tensor.shape for name, tensor in tensors_of(saved).items()}
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    if adapted(model):
        if is_own and manifest is not None and manifest.job.get("checkpoint.save_adapters_only"):
            shapes = {name: shapes[name] for name in trained_names(model)}
        elif not is_own and not any(map(is_factor, saved_shapes)):
            # A checkpoint of the base model, to which the job adds adapters.
            shapes = {name: shape for name, shape in shapes.items() if not is_factor(name)}
    return differences(saved_shapes, shapes)


def tensors_of(saved: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the weights in a checkpoint's index by name, as tensors on meta."""
    return {
        name: torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
        for name, entry in saved.items()
        if isinstance(entry, TensorStorageMetadata) and name.partition(".")[0] not in _OTHER_STATES
    }


def check_optimizer(checkpoint: Path, groups: Iterable[ParameterGroup], key: str) -> None:
    """Refuse a checkpoint whose optimizer state does not belong to the job's optimizers.

    A parameter without a state is accepted: it had no gradient before the save, and begins with a new state.

    Args:
        checkpoint: a distributed checkpoint.
        groups: the job's parameter groups.
        key: the option that names the checkpoint, for the message.

    Raises:
        ConfigError: a parameter's state belongs to another optimizer (names the parameter), or there is no state at all.
    """
    saved = CheckpointReader(checkpoint).read_metadata().state_dict_metadata
    if not parameters_with_state(saved):
        raise ConfigError(
            f"{key}: {checkpoint} holds no optimizer state; begin with new optimizer states: "
            'exclude_from_loading = ["optimizer"] in [checkpoint]'
        )
    for group in groups:
        state = "momentum_buffer" if group.optimizer == "Muon" else "exp_avg"
        for name in group.parameters:
            prefix = f"optimizer.state.{name}."
            saved_states = [entry.removeprefix(prefix) for entry in saved if entry.startswith(prefix)]
            if saved_states and state not in saved_states:
                raise ConfigError(
                    f"{key}: {checkpoint} holds {' and '.join(saved_states)} of {name}, but "
                    f"{group.optimizer}, which trains it in this job, needs {state}; use the optimizer of that run, or "
                    'begin with new states: exclude_from_loading = ["optimizer"] in [checkpoint]'
                )


def parameters_with_state(saved: Iterable[str]) -> set[str]:
    """Return the names of the parameters that have optimizer state, given the keys of a checkpoint's index."""
    prefix = "optimizer.state."
    return {key.removeprefix(prefix).rpartition(".")[0] for key in saved if key.startswith(prefix)}


def damaged(checkpoint: Path, key: str, fault: str) -> ConfigError:
    """Return the error for a checkpoint in which `damage` or `truncated` has found a fault."""
    remedy = folder.remedy(checkpoint) if key == "checkpoint.folder" else "take another checkpoint"
    return ConfigError(f"{key}: {fault}; {remedy}")


def truncated(checkpoint: Path, index: Metadata) -> str | None:
    """Return a sentence about the first file that is missing or shorter than the index says; None if there is none."""
    # Without a manifest there are no checksums, so only existence and size can be checked.
    sizes: dict[str, int] = {}
    for entry in (index.storage_data or {}).values():
        sizes[entry.relative_path] = max(sizes.get(entry.relative_path, 0), entry.offset + entry.length)
    for name, size in sizes.items():
        if not (checkpoint / name).is_file() or (checkpoint / name).stat().st_size < size:
            return f"{checkpoint / name} is truncated or missing"
    return None
