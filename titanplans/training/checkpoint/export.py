"""`titanplans export`: convert a distributed checkpoint, or adapters and their base weights, to a Hugging Face folder.

The conversion runs in one process on a CPU, tensor by tensor. It needs memory for the largest tensor, or for the tensors
that transformers' format combines into one; with --adapter, for all adapters.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from transformers import CONFIG_MAPPING, PretrainedConfig

from titanplans import hub, kernels, modeling
from titanplans.adapters.add import add_adapters
from titanplans.config import LoRA
from titanplans.errors import ConfigError
from titanplans.modeling.user_model import user_model_config
from titanplans.precision.nf4 import is_quantised
from titanplans.split.adapted import is_factor
from titanplans.training.checkpoint.convert import describe_size
from titanplans.training.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    chat_templates_of,
    initial_weights_folder,
    read_manifest,
)
from titanplans.training.checkpoint.match import describe_model_changes
from titanplans.training.checkpoint.model_card import write_model_card
from titanplans.training.checkpoint.multi_token import find_layers
from titanplans.training.checkpoint.weights import (
    adapter_weights,
    add_base_weights,
    base_weights,
    checkpoint_weights,
)
from titanplans.training.data.vocabulary import default_tokenizer_path
from titanplans.weights.adapters import (
    CONFIG,
    adapter_config,
    adapter_options,
    base_model,
    peft_name,
    trained_names,
    write_adapter,
)
from titanplans.weights.atomic import written_atomically
from titanplans.weights.lazy import LazyTensor
from titanplans.weights.merged import merged, named_adapted
from titanplans.weights.save import write_folder


def export(
    checkpoint: Path,
    folder: Path,
    *,
    config: str | None = None,
    dtype: str | None = None,
    max_shard_size: int | str = "5GB",
    tokenizer: str | None = None,
    chat_template: str | None = None,
    adapter: bool = False,
    base: str | None = None,
    title: str | None = None,
) -> str:
    """Write the weights of a checkpoint as a Hugging Face folder with a model card; return a sentence about the files.

    Adapters are merged into the weights. If the checkpoint holds only adapters, they are merged into the base weights of the
    folder that the job started from.

    Args:
        checkpoint: a step-N folder of titanplans; a step-N folder of torchtitan (without a manifest), if its weights have
            the model's parameter names; or a folder with peft's adapters.
        folder: where to write; must not exist.
        config: a config.json, or a folder with a config.json; None: the manifest's config.
        dtype: dtype of the floating-point tensors in the files; None: as saved.
        max_shard_size: largest size of a file, in bytes or as "500MB".
        tokenizer: a folder or a repository with a tokenizer; None: the job's tokenizer, or else the base model's, if there
            is one.
        chat_template: a Jinja file that replaces the tokenizer's template; None: the job's template.
        adapter: write only the adapters, in peft's format.
        base: for a checkpoint of adapters only: a Hugging Face folder, a repository or a step-N folder with the base
            weights; None: the folder or repository that the manifest or peft's config names.
        title: title of the model card, such as the name of a repository on the Hub; None: the folder's name.

    Raises:
        ConfigError, ModelError: the checkpoint is damaged or of another model, options don't fit it, or `folder` exists.
        NotSaved: the disk is full, or refuses to write.
    """
    what, to_dtype = f"export {checkpoint}", None if dtype is None else getattr(torch, dtype)
    open_source = _open_peft_folder if _is_peft(checkpoint) else _open_checkpoint
    source = open_source(checkpoint, what, config, base)
    if adapter and (source.adapted_model is None or _is_peft(checkpoint)):
        reason = "it already has peft's format" if source.adapted_model else "it has no adapters (lora.rank)"
        raise ConfigError(f"{what}: {reason}; remove --adapter")
    if base is not None and (adapter or not source.is_adapter_only):
        reason = "--adapter writes no base weights" if adapter else "the checkpoint holds all of them"
        raise ConfigError(f"{what}: --base names the base weights of adapters, but {reason}; remove --base")
    if adapter and (tokenizer or chat_template):
        option = "--tokenizer" if tokenizer else "--chat-template"
        raise ConfigError(f"{what}: --adapter writes no tokenizer; remove {option}")
    if adapter:
        assert source.adapted_model is not None
        values = {
            peft_name(name): source.weights[name].read().to(to_dtype)
            for name in trained_names(source.adapted_model)
        }
        with written_atomically(folder) as directory:
            write_adapter(directory, adapter_config(source.adapted_model, source.base), values)
            write_model_card(
                directory,
                title or folder.name,
                source.config,
                source.manifest,
                source.base or "the base model",
            )
        return f"{folder}: {describe_size(folder)}, adapters that peft.PeftModel.from_pretrained reads"
    weights, note, weights_folder = source.weights, "", checkpoint
    if source.adapted_model is not None:
        adapters = named_adapted(source.adapted_model)
        if any(map(is_quantised, adapters.values())):
            note = (
                "; the adapters were added to base weights rounded to NF4. To add them to the unrounded weights, export "
                "with --adapter, then export that folder"
            )
        if source.is_adapter_only:
            is_recorded = base is None and source.manifest is not None
            weights_folder = base_folder = _require_base(source.base, what, is_recorded=is_recorded)
            overrides = source.manifest.job.get("model.config_overrides", ()) if source.manifest else ()
            plain = modeling.build(source.config)
            base_tensors = base_weights(plain, base_folder, f"{what}: {base_folder}", overrides)
            # Cast base weights to a dtype at least as wide as the dtype of the job's adapters. For peft's folder, which
            # has no job, cast them to a dtype at least as wide as --dtype, if it is set.
            factor_dtypes = (tensor.dtype for name, tensor in weights.items() if is_factor(name))
            least_dtype = to_dtype if source.manifest is None else next(factor_dtypes)
            weights = add_base_weights(weights, base_tensors, adapters, least_dtype)
        weights = merged(weights, adapters)
    if tokenizer is None:
        tokenizer = _tokenizer_folder(source, what)
    else:
        tokenizer = _local_folder(tokenizer, what, [hub.TOKENIZER], is_recorded=False)
    template = None if tokenizer is None else chat_template or _chat_template(source, what)
    if chat_template is not None and tokenizer is None:
        raise ConfigError(
            f"{what}: --chat-template belongs to a tokenizer, but there is none; pass a tokenizer's folder with --tokenizer"
        )
    template_text = None if template is None else _read_template(template, what)
    layers = find_layers(weights_folder, modeling.build(source.config))
    if layers is not None:
        note += f"; {layers.describe()}"
    with written_atomically(folder) as directory:
        write_folder(
            directory,
            source.config,
            weights,
            dtype=to_dtype,
            max_shard_size=max_shard_size,
            tokenizer=tokenizer,
            chat_template=template_text,
            others=None if layers is None else layers.tensors(),
        )
        write_model_card(directory, title or folder.name, source.config, source.manifest)
    tokenizer_text = (
        f"the tokenizer of {tokenizer}" if tokenizer else "no tokenizer (pass one with --tokenizer)"
    )
    tokenizer_text += f" with the chat template {template}" if template else ""
    return f"{folder}: {describe_size(folder)}, {tokenizer_text}{note}"


class _ExportSource(NamedTuple):
    """The checkpoint, or the folder with peft's adapters, to export."""

    weights: dict[str, LazyTensor]
    config: PretrainedConfig
    manifest: Manifest | None
    adapted_model: nn.Module | None
    """The model with its adapters, on meta; None if it has no adapters."""
    is_adapter_only: bool
    """Whether the base weights are missing."""
    base: str | None
    """The folder or the repository of the base weights, if one is known."""


def _is_peft(folder: Path) -> bool:
    return os.path.isfile(folder / CONFIG) and not os.path.isfile(folder / ".metadata")


def _open_peft_folder(folder: Path, what: str, config: str | None, base: str | None) -> _ExportSource:
    options = adapter_options(folder)
    base = base or base_model(folder)
    hf_config, _ = _config_and_manifest(config, _require_base(base, what, is_recorded=False))
    model = _build_with_adapters(hf_config, options)
    return _ExportSource(adapter_weights(model, folder), hf_config, None, model, True, base)


def _open_checkpoint(checkpoint: Path, what: str, config: str | None, base: str | None) -> _ExportSource:
    weights = checkpoint_weights(checkpoint, what)
    hf_config, manifest = _config_and_manifest(config, checkpoint)
    job = {} if manifest is None else manifest.job
    options = {key.removeprefix("lora."): value for key, value in job.items() if key.startswith("lora.")}
    model = _build_with_adapters(hf_config, LoRA(**options)) if options.get("rank") else None
    is_adapter_only = model is not None and job.get("checkpoint.save_adapters_only", False)
    base = base or initial_weights_folder(job)
    return _ExportSource(weights, hf_config, manifest, model, is_adapter_only, base)


def _config_and_manifest(config_path: str | None, folder: Path) -> tuple[PretrainedConfig, Manifest | None]:
    """Return the model's config, and the manifest if there is one; refuse a --config that differs from the manifest's."""
    import fla.models  # noqa: F401  # registers FLA's model types with transformers

    kernels.install("cpu")
    manifest = read_manifest(folder) if os.path.isfile(folder / MANIFEST) else None
    if manifest is None and config_path is None and not os.path.isfile(folder / "config.json"):
        raise ConfigError(
            f"export {folder}: it has no {MANIFEST}, which names the model; pass the model's config with --config"
        )
    if manifest is None or config_path is not None:
        config = modeling.load_config_file(config_path or folder)
        if manifest is not None and (changes := describe_model_changes(manifest.model, config)):
            raise ConfigError(
                f"--config {config_path}: {folder} is of another model ({changes}); remove --config"
            )
        return config, manifest
    values = dict(manifest.model)
    if "own_class" in values:
        return user_model_config(values["own_class"], values["own_arguments"]), manifest
    return CONFIG_MAPPING[values["model_type"]].from_dict(values), manifest


def _local_folder(
    folder: str, what: str, required: Sequence[str], *, is_recorded: bool, weights: bool = False
) -> str:
    """Return the local folder of the repository that `folder` names; return `folder` itself if it is a local folder.

    `is_recorded`: a manifest names `folder`. Manifests name a repository with its commit, so a name without a commit is a
    local folder.
    """
    repository = hub.repository_of(folder)
    if is_recorded and (repository is None or not repository.has_commit):
        return folder
    return hub.local_folder(folder, f"{what}: {folder}", required, weights=weights)


def _require_base(base: str | None, what: str, *, is_recorded: bool) -> Path:
    """Return the local folder of the base weights; raise a ConfigError if it is unknown or does not exist."""
    if base is not None:
        base = _local_folder(base, what, [hub.CONFIG], is_recorded=is_recorded, weights=True)
    if base is None or not os.path.isdir(base):
        reason = "nothing names their base weights" if base is None else f"there is no {base}"
        raise ConfigError(
            f"{what}: it holds only adapters, and {reason}; pass the folder of their base weights with --base"
        )
    return Path(base)


def _tokenizer_folder(source: _ExportSource, what: str) -> str | None:
    """Return the local folder of the job's tokenizer, or else of the base model's; None if there is none."""
    if source.manifest is not None and source.manifest.job:
        job = source.manifest.job
        hf_folder = job.get("checkpoint.initial_load_in_hf") and job.get("checkpoint.initial_load_path")
        folder = job.get("model.hf_assets_path") or hf_folder or default_tokenizer_path()
        folder = _local_folder(folder, what, [hub.TOKENIZER], is_recorded=True)
        if os.path.isdir(folder):
            return folder
    if source.base is None:
        return None
    folder = _local_folder(source.base, what, [hub.CONFIG], is_recorded=source.manifest is not None)
    return folder if os.path.isfile(os.path.join(folder, hub.TOKENIZER)) else None


def _chat_template(source: _ExportSource, what: str) -> str | None:
    """Return the Jinja file of the job's chat template; None if it used the tokenizer's template, or none."""
    templates = set() if source.manifest is None else chat_templates_of(source.manifest.job)
    if len(templates) > 1:
        names = " and ".join(sorted(template or "the tokenizer's own" for template in templates))
        raise ConfigError(
            f"{what}: its sources were formatted by several chat templates ({names}); pass one with --chat-template"
        )
    return next(iter(templates), None)


def _read_template(path: str, what: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(
            f"{what}: the chat template {path} can't be read ({reason}); pass a Jinja file with --chat-template"
        ) from error


def _build_with_adapters(config: PretrainedConfig, options: LoRA) -> nn.Module:
    model = modeling.build(config)
    add_adapters(model, options)
    return model
