"""`titanplans export`: a distributed checkpoint, or adapters and the weights they belong to, to a Hugging Face folder.

In one process, on a CPU, tensor by tensor: no more is in memory than the largest one, and what transformers makes one of.
"""

import os
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from transformers import CONFIG_MAPPING, PretrainedConfig

from titanplans import kernels, modeling
from titanplans.adapters.add import add_adapters
from titanplans.config import LoRA
from titanplans.errors import ConfigError
from titanplans.modeling.own import own_config
from titanplans.precision.nf4 import is_quantised
from titanplans.split.adapted import is_factor
from titanplans.training.checkpoint.card import CARD, Card, base_of, chat_templates_of, read_card
from titanplans.training.checkpoint.convert import size_of
from titanplans.training.checkpoint.match import other_model
from titanplans.training.checkpoint.weights import of_adapter, of_base, of_checkpoint, with_base
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
) -> str:
    """Write the weights of a step-N folder as a Hugging Face folder; return a sentence about the files.

    Adapters are added to their weights; where they are saved alone, to those of the folder that the job started from.

    Args:
        checkpoint: of ours, or one without a card, torchtitan's, whose weights have the model's own names; or a folder of
            peft's adapters.
        folder: is not there yet.
        config: a config.json, or the folder of one; None for the card's.
        dtype: of the floating-point tensors; None for the saved.
        max_shard_size: bytes, or "500MB".
        tokenizer: a folder with a tokenizer; None for the one that the card names, if it is there.
        chat_template: a Jinja file that takes the place of the tokenizer's template; None for the one that the card names.
        adapter: write the adapters as peft does, and not the weights.
        base: of adapters alone, a Hugging Face folder or a step-N folder with their base weights; None for the one that
            the card, or peft's config, names.

    Raises:
        ConfigError, ModelError: the checkpoint is damaged or none, of another model, or `folder` is there.
        NotSaved: the disk is full, or refuses.
    """
    what, given = f"export {checkpoint}", None if dtype is None else getattr(torch, dtype)
    found = (_of_peft if _is_peft(checkpoint) else _of_job)(checkpoint, what, config, base)
    if adapter and (found.adapted is None or _is_peft(checkpoint)):
        why = "it already has peft's format" if found.adapted else "it has no adapters (lora.rank)"
        raise ConfigError(f"{what}: {why}; remove --adapter")
    if base is not None and (adapter or not found.alone):
        why = "--adapter writes none of them" if adapter else "it holds all of them"
        raise ConfigError(
            f"{what}: --base is for weights that adapters are added to, but {why}; remove --base"
        )
    if adapter and (tokenizer or chat_template):
        option = "--tokenizer" if tokenizer else "--chat-template"
        raise ConfigError(f"{what}: a folder of --adapter has no tokenizer; remove {option}")
    if adapter:
        assert found.adapted is not None
        values = {peft_name(name): found.own[name].read().to(given) for name in trained_names(found.adapted)}
        with written_atomically(folder) as directory:
            write_adapter(directory, adapter_config(found.adapted, found.base), values)
        return f"{folder}: {size_of(folder)}, adapters that peft.PeftModel.from_pretrained reads"
    weights, rounded = found.own, ""
    if found.adapted is not None:
        adapters = named_adapted(found.adapted)
        if any(map(is_quantised, adapters.values())):
            rounded = "; added to weights rounded to NF4: --adapter, and an export of that folder, add to the whole base"
        if found.alone:
            named = _base(found.base, what)
            overrides = found.card.job.get("model.config_overrides", ()) if found.card is not None else ()
            others = of_base(modeling.build(found.config), named, f"{what}: {named}", overrides)
            factors = (tensor.dtype for name, tensor in weights.items() if is_factor(name))
            weights = with_base(weights, others, adapters, given if found.card is None else next(factors))
        weights = merged(weights, adapters)
    tokenizer = tokenizer or _tokenizer(found)
    template = None if tokenizer is None else chat_template or _chat_template(found, what)
    if chat_template is not None and tokenizer is None:
        raise ConfigError(
            f"{what}: --chat-template belongs to a tokenizer, and there is none; name it by --tokenizer"
        )
    text = None if template is None else _read_template(template, what)
    with written_atomically(folder) as directory:
        write_folder(
            directory,
            found.config,
            weights,
            dtype=given,
            max_shard_size=max_shard_size,
            tokenizer=tokenizer,
            chat_template=text,
        )
    beside_it = f"the tokenizer of {tokenizer}" if tokenizer else "no tokenizer: --tokenizer names one"
    beside_it += f" with the chat template {template}" if template else ""
    return f"{folder}: {size_of(folder)}, {beside_it}{rounded}"


class _Found(NamedTuple):
    """What is to be exported."""

    own: dict[str, LazyTensor]
    config: PretrainedConfig
    card: Card | None
    adapted: nn.Module | None
    """The model with its adapters, on meta; None if there are none."""
    alone: bool
    """Adapters without their base weights."""
    base: str | None
    """The folder of these weights."""


def _is_peft(folder: Path) -> bool:
    return os.path.isfile(folder / CONFIG) and not os.path.isfile(folder / ".metadata")


def _of_peft(folder: Path, what: str, config: str | None, base: str | None) -> _Found:
    options = adapter_options(folder)
    named = base or base_model(folder)
    hf_config, _ = _config(config, _base(named, what))
    adapted = _with_adapters(hf_config, options)
    return _Found(of_adapter(adapted, folder), hf_config, None, adapted, True, named)


def _of_job(checkpoint: Path, what: str, config: str | None, base: str | None) -> _Found:
    own = of_checkpoint(checkpoint, what)
    hf_config, card = _config(config, checkpoint)
    job = {} if card is None else card.job
    options = {key.removeprefix("lora."): value for key, value in job.items() if key.startswith("lora.")}
    adapted = _with_adapters(hf_config, LoRA(**options)) if options.get("rank") else None
    alone = adapted is not None and job.get("checkpoint.save_adapters_only", False)
    return _Found(own, hf_config, card, adapted, alone, base or base_of(job))


def _config(given: str | None, folder: Path) -> tuple[PretrainedConfig, Card | None]:
    """Return the model's config and the card, if there is one; refuse two that differ, of the command and of the card."""
    import fla.models  # noqa: F401  # registers FLA's model types with transformers

    kernels.install("cpu")
    card = read_card(folder) if os.path.isfile(folder / CARD) else None
    if card is None and given is None and not os.path.isfile(folder / "config.json"):
        raise ConfigError(f"export {folder}: it has no {CARD}, which names the model; give its --config")
    if card is None or given is not None:
        config = modeling.load_config_file(given or folder)
        if card is not None and (differing := other_model(card.model, config)):
            raise ConfigError(
                f"--config {given}: {folder} is of another model ({differing}); remove --config"
            )
        return config, card
    values = dict(card.model)
    if "own_class" in values:
        return own_config(values["own_class"], values["own_arguments"]), card
    return CONFIG_MAPPING[values["model_type"]].from_dict(values), card


def _base(named: str | None, what: str) -> Path:
    """Return the folder of the base weights of adapters; refuse one that is not there."""
    if named is None or not os.path.isdir(named):
        why = "nothing names the folder of their base weights" if named is None else f"there is no {named}"
        raise ConfigError(f"{what}: it holds only adapters, and {why}; name it by --base")
    return Path(named)


def _tokenizer(found: _Found) -> str | None:
    """Return the folder of the tokenizer that a job had, or else of its model; None if there is none."""
    if found.card is not None and found.card.job:
        job = found.card.job
        published = job.get("checkpoint.initial_load_in_hf") and job.get("checkpoint.initial_load_path")
        named = job.get("model.hf_assets_path") or published or default_tokenizer_path()
        if os.path.isdir(named):
            return named
    has_one = found.base is not None and os.path.isfile(os.path.join(found.base, "tokenizer.json"))
    return found.base if has_one else None


def _chat_template(found: _Found, what: str) -> str | None:
    """Return the Jinja file by which a job wrote conversations; None if it was the tokenizer's own, or none."""
    templates = set() if found.card is None else chat_templates_of(found.card.job)
    if len(templates) > 1:
        named = " and ".join(sorted(template or "the tokenizer's own" for template in templates))
        raise ConfigError(
            f"{what}: its sources were written by several chat templates ({named}); name one by --chat-template"
        )
    return next(iter(templates), None)


def _read_template(path: str, what: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(
            f"{what}: the chat template {path} can't be read ({reason}); name a Jinja file by --chat-template"
        ) from error


def _with_adapters(config: PretrainedConfig, options: LoRA) -> nn.Module:
    """Return the model of `config` with adapters, on meta."""
    model = modeling.build(config)
    add_adapters(model, options)
    return model
