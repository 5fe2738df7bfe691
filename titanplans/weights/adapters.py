"""Adapters in peft's files, of a model that is split in any way: written and read.

    adapter_config.json          rank, alpha, the modules that have adapters, and those that train as they are
    adapter_model.safetensors    base_model.model.NAME.lora_A.weight, ...lora_B.weight, base_model.model.NAME.weight

`peft.PeftModel.from_pretrained(base, folder)` reads them. Nothing is unpickled. How an adapter computes is in
`titanplans.adapters.low_rank`.
"""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from titanplans.adapters.low_rank import takes_adapter
from titanplans.config import LoRA
from titanplans.disk import sync
from titanplans.errors import ModelError
from titanplans.split.adapted import LowRank, is_factor, is_transposed, low_rank_of
from titanplans.split.decoder import without_wrappers
from titanplans.split.objects import rank
from titanplans.split.parameters.shards import copy_shard
from titanplans.weights.atomic import on_first_rank
from titanplans.weights.compare import differences
from titanplans.weights.files import write_safetensors
from titanplans.weights.gather import gather, stored
from titanplans.weights.merged import named_adapted

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    **dict.fromkeys(("use_dora", "use_rslora", "lora_bias", "use_qalora"), (False, None)),
    **dict.fromkeys(("rank_pattern", "alpha_pattern"), ({}, None)),
    **dict.fromkeys(
        (
            *("layers_to_transform", "layer_replication", "target_parameters", "trainable_token_indices"),
            *("alora_invocation_tokens", "arrow_config", "monteclora_config"),
        ),
        (None,),
    ),
}
"""Of an adapter_config.json, what changes how an adapter computes, and the values that ours computes by."""


def save_adapter(model: nn.Module, folder: str | os.PathLike[str], *, base_model: str | None = None) -> None:
    """Write the adapters of `model`, and the other trained parameters, as peft does. Collective; rank 0 writes.

    Args:
        model: with adapters, split in any way or not at all.
        folder: made if it is not there; files of these names in it are replaced.
        base_model: name or folder of the model that they belong to, for adapter_config.json.

    Raises:
        ModelError: there are no adapters, or they differ in rank or scaling.
        NotSaved: the folder can't be written.
    """
    config, tensors = gathered_adapter(model, base_model)
    on_first_rank(lambda: write_adapter(Path(folder), config, tensors), Path(folder))


def gathered_adapter(
    model: nn.Module, base_model: str | None = None
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return what `save_adapter` writes: the config, and on rank 0 whole tensors by peft's names. Collective."""
    config, trained = adapter_config(model, base_model), trained_names(model)
    tensors = gather(model, only=trained.__contains__)
    return config, {peft_name(name): tensor for name, tensor in tensors if rank() == 0}


def write_adapter(
    folder: Path,
    config: Mapping[str, Any],
    tensors: dict[str, torch.Tensor],
    seal: Callable[[Path], None] = sync,
) -> None:
    """Write peft's two files, the weights first under a temporary name; `tensors` have peft's names, and one process writes.

    `seal` brings each file to the disk, as for `write_folder`.

    Raises:
        OSError: the disk is full, or refuses.
    """
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = f"{WEIGHTS}.writing"
    write_safetensors(folder, {unfinished: tensors}, iter(tensors.items()), seal=sync)
    os.replace(folder / unfinished, folder / WEIGHTS)
    (folder / CONFIG).write_text(json.dumps(config, indent=2), encoding="utf-8")
    for name in (WEIGHTS, CONFIG):
        seal(folder / name)
    sync(folder)


def load_adapter(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Give the adapters of `model`, and the other trained parameters, the values of peft's files; each rank keeps its part.

    Args:
        model: with memory and with adapters of the same rank, alpha and modules, split in any way or not at all. They are
            what `add_adapters(model, adapter_options(folder))` adds.
        folder: as peft or `save_adapter` wrote it.

    Raises:
        ModelError: with all that differs, before a value is changed; or the files are damaged.
    """
    check_adapter(model, folder)
    targets = stored(model)[0]
    with safe_open(Path(folder) / WEIGHTS, "pt") as file:
        for name in trained_names(model):
            copy_shard(targets[name], file.get_tensor(peft_name(name)), name=name)


def check_adapter(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Compare peft's files with the adapters of `model`, which may lie on meta; no value is read.

    Raises:
        ModelError: as `load_adapter`.
    """
    path, options = Path(folder), adapter_options(folder)
    theirs = LowRank(options.rank or 0, (options.alpha or 0) / (options.rank or 1))
    for name, ours in _low_ranks(model).items():
        if ours != theirs:
            raise ModelError(
                f"{path / CONFIG} has r = {theirs.rank} and lora_alpha = {options.alpha:g}, and the adapter of {name} has "
                f"rank {ours.rank} and alpha {ours.scaling * ours.rank:g}: give lora.rank and lora.alpha these values"
            )
    if not os.path.isfile(path / WEIGHTS):
        raise ModelError(
            f"{path} has no {WEIGHTS}; a pickled adapter_model.bin is not read: save it by peft anew"
        )
    try:
        with safe_open(path / WEIGHTS, "pt") as file:
            there = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118  no mapping
    except SafetensorError as error:
        raise ModelError(f"{path / WEIGHTS} is damaged ({error})") from error
    state = stored(model)[0]
    here = {peft_name(name): tuple(state[name].shape) for name in trained_names(model)}
    if differing := differences(there, here):
        raise ModelError(
            f"{path / WEIGHTS} is of other adapters: {differing}. lora.target_modules and lora.modules_to_save say "
            f"which there are, {path / CONFIG} which it has"
        )


def adapter_options(folder: str | os.PathLike[str]) -> LoRA:
    """Return the options of peft's adapter_config.json.

    Raises:
        ModelError: it is not there, damaged, or of an adapter that computes in another way.
    """
    path = Path(folder) / CONFIG
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        for key, known in _PLAIN.items():
            if values.get(key, known[0]) not in known:
                raise ModelError(
                    f"{path} has {key} = {json.dumps(values[key])}, and adapters here are LoRA's own, "
                    f"{json.dumps(known[0])}: merge it into the weights by peft, and start from these"
                )
        return LoRA(
            rank=values["r"],
            alpha=float(values["lora_alpha"]),
            dropout=values.get("lora_dropout") or 0.0,
            target_modules=_words(values["target_modules"]),
            exclude_modules=_words(values.get("exclude_modules")),
            modules_to_save=_words(values.get("modules_to_save")),
        )
    except OSError as error:
        raise ModelError(f"{path} can't be read ({error.strerror})") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(
            f"{path} is no adapter_config.json of peft ({type(error).__name__}: {error})"
        ) from error


def base_model(folder: str | os.PathLike[str]) -> str | None:
    """Return the model, a folder or a hub's name, in peft's adapter_config.json, which `adapter_options` has read."""
    return json.loads((Path(folder) / CONFIG).read_text(encoding="utf-8")).get("base_model_name_or_path")


def adapter_config(model: nn.Module, base_model: str | None = None) -> dict[str, Any]:
    """Return the adapter_config.json of the adapters of `model`.

    Raises:
        ModelError: there are none, or they differ.
    """
    kinds = set(_low_ranks(model).values())
    if len(kinds) != 1:
        raise ModelError(
            f"peft's files hold adapters of one rank and scaling, and the model's have {kinds or 'none'}"
        )
    (low_rank,) = kinds
    modules = named_adapted(model)
    alpha = low_rank.scaling * low_rank.rank
    dropout: Any = next(
        (m._modules["lora_dropout"] for m in modules.values() if "lora_dropout" in m._modules), None
    )
    saved = {name.rpartition(".")[0] for name in trained_names(model) if not is_factor(name)}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if hasattr(model, "lm_head") else None,
        "base_model_name_or_path": base_model,
        "r": low_rank.rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": 0.0 if dropout is None else dropout.p,
        "target_modules": _ends(model, list(modules)),
        "modules_to_save": sorted(saved) or None,
        "fan_in_fan_out": any(map(is_transposed, modules.values())),
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }


def trained_names(model: nn.Module) -> dict[str, None]:
    """Return the names, in the state dict, of the tensors in an adapter's files: factors, and other trained ones."""
    # Not asked of the state dict's tensors: those that FSDP2 gathers in float8 are made anew, without a gradient.
    every = model.named_parameters(remove_duplicate=False)
    trained = {without_wrappers(name) for name, parameter in every if parameter.requires_grad}
    return {name: None for name in model.state_dict() if is_factor(name) or name in trained}


def peft_name(name: str) -> str:
    """Return a parameter's name in peft's file: "base_model.model.q_proj.lora_A.weight" for "q_proj.lora_A"."""
    return f"{_PREFIX}{name}.weight" if is_factor(name) else f"{_PREFIX}{name}"


def _low_ranks(model: nn.Module) -> dict[str, LowRank]:
    adapters = {name: low_rank_of(module) for name, module in named_adapted(model).items()}
    return {name: low_rank for name, low_rank in adapters.items() if low_rank is not None}


def _ends(model: nn.Module, chosen: list[str]) -> list[str]:
    """Return the last parts of the names in `chosen` if they stand for no other module; else the whole names."""
    ends = {name.rpartition(".")[2] for name in chosen}
    every = [without_wrappers(name) for name, module in model.named_modules() if takes_adapter(module)]
    alike = {name for name in every if name.rpartition(".")[2] in ends}
    return sorted(ends) if alike == set(chosen) else sorted(chosen)


def _words(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, str) else tuple(value)
