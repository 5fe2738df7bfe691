"""Save and load the adapters of a split model in peft's files.

    adapter_config.json          rank, alpha, the modules with adapters, and the modules that train without one
    adapter_model.safetensors    base_model.model.NAME.lora_A.weight, ...lora_B.weight, base_model.model.NAME.weight

`peft.PeftModel.from_pretrained(base, folder)` loads them. Nothing is unpickled.
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
from titanplans.hub import repository_of
from titanplans.split.adapted import LowRank, is_factor, is_transposed, low_rank_of
from titanplans.split.decoder import without_wrappers
from titanplans.split.objects import rank
from titanplans.split.parameters.shards import copy_shard
from titanplans.weights.atomic import on_first_rank
from titanplans.weights.compare import differences
from titanplans.weights.files import write_safetensors
from titanplans.weights.gather import gather, state_tensors
from titanplans.weights.merged import named_adapted

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_SUPPORTED: dict[str, tuple[Any, ...]] = {
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
"""The supported values of those keys of adapter_config.json that change how an adapter computes."""


def save_adapter(model: nn.Module, folder: str | os.PathLike[str], *, base_model: str | None = None) -> None:
    """Save the adapters of `model`, and its other trained parameters, in peft's format. Collective; rank 0 writes.

    Args:
        model: a split or unsplit model with adapters.
        folder: the folder to write. It is created if it does not exist; peft's two files in it are replaced.
        base_model: name or folder of the base model, for adapter_config.json.

    Raises:
        ModelError: there are no adapters, or they differ in rank or scaling.
        NotSaved: the folder can't be written.
    """
    config, tensors = gather_adapter(model, base_model)
    on_first_rank(lambda: write_adapter(Path(folder), config, tensors), Path(folder))


def gather_adapter(
    model: nn.Module, base_model: str | None = None
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return the config that `save_adapter` writes and, on rank 0, the full tensors by peft's names. Collective."""
    config, trained = adapter_config(model, base_model), trained_names(model)
    tensors = gather(model, only=trained.__contains__)
    return config, {peft_name(name): tensor for name, tensor in tensors if rank() == 0}


def write_adapter(
    folder: Path,
    config: Mapping[str, Any],
    tensors: dict[str, torch.Tensor],
    seal: Callable[[Path], None] = sync,
) -> None:
    """Write peft's two files in one process.

    Args:
        folder: the folder to write; it is created if it does not exist.
        config: the values of adapter_config.json.
        tensors: the tensors by peft's names.
        seal: called with each file, to sync it to the disk.

    Raises:
        OSError: the disk is full, or refuses to write.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # The file has a temporary name first, so that an older file of weights is replaced only by a complete one.
    temporary = f"{WEIGHTS}.writing"
    write_safetensors(folder, {temporary: tensors}, iter(tensors.items()), seal=sync)
    os.replace(folder / temporary, folder / WEIGHTS)
    (folder / CONFIG).write_text(json.dumps(config, indent=2), encoding="utf-8")
    for name in (WEIGHTS, CONFIG):
        seal(folder / name)
    sync(folder)


def load_adapter(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Load adapters and other trained parameters from peft's files into `model`; each rank keeps its shards.

    Args:
        model: a split or unsplit model, not on meta, with adapters of the same rank, alpha and modules; e.g. those that
            `add_adapters(model, adapter_options(folder))` adds.
        folder: a folder that peft or `save_adapter` has written.

    Raises:
        ModelError: the files are damaged, or do not fit the model (names what differs). No value has been changed then.
    """
    check_adapter(model, folder)
    targets = state_tensors(model)[0]
    with safe_open(Path(folder) / WEIGHTS, "pt") as file:
        for name in trained_names(model):
            copy_shard(targets[name], file.get_tensor(peft_name(name)), name=name)


def check_adapter(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Compare peft's files with the adapters of `model`, which may be on meta, without reading values.

    Raises:
        ModelError: the files are damaged, or do not fit the model (names what differs).
    """
    path, options = Path(folder), adapter_options(folder)
    saved = LowRank(options.rank or 0, (options.alpha or 0) / (options.rank or 1))
    for name, low_rank in _low_ranks(model).items():
        if low_rank != saved:
            raise ModelError(
                f"{path / CONFIG} has r = {saved.rank} and lora_alpha = {options.alpha:g}, but the adapter of {name} has "
                f"rank {low_rank.rank} and alpha {low_rank.scaling * low_rank.rank:g}: set lora.rank and lora.alpha to the "
                "file's values"
            )
    if not os.path.isfile(path / WEIGHTS):
        raise ModelError(
            f"{path} has no {WEIGHTS}; a pickled adapter_model.bin is not read: save the adapter as "
            "safetensors with peft"
        )
    try:
        with safe_open(path / WEIGHTS, "pt") as file:
            file_shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118  no mapping
    except SafetensorError as error:
        raise ModelError(f"{path / WEIGHTS} is damaged ({error})") from error
    state = state_tensors(model)[0]
    model_shapes = {peft_name(name): tuple(state[name].shape) for name in trained_names(model)}
    if changes := differences(file_shapes, model_shapes):
        raise ModelError(
            f"{path / WEIGHTS} has other adapters than the model: {changes}. Set lora.target_modules and "
            f"lora.modules_to_save to the values in {path / CONFIG}"
        )


def adapter_options(folder: str | os.PathLike[str]) -> LoRA:
    """Return the options of peft's adapter_config.json.

    Raises:
        ModelError: the file is missing or damaged, or describes an adapter other than plain LoRA.
    """
    path = Path(folder) / CONFIG
    try:
        return options_of_peft(json.loads(path.read_text(encoding="utf-8")), str(path))
    except OSError as error:
        raise ModelError(f"{path} can't be read ({error.strerror})") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(
            f"{path} is not an adapter_config.json of peft ({type(error).__name__}: {error})"
        ) from error


def options_of_peft(values: Mapping[str, Any], where: str) -> LoRA:
    """Convert the `values` of peft's LoraConfig to options; `where` names their source, for errors.

    Raises:
        ModelError: the values describe an adapter other than plain LoRA.
        KeyError, TypeError, ValueError: a value is missing, or has another type than in peft.
    """
    for key, supported in _SUPPORTED.items():
        if values.get(key, supported[0]) not in supported:
            raise ModelError(
                f"{where} has {key} = {json.dumps(values[key])}, but only plain LoRA, with {json.dumps(supported[0])}, is "
                "supported: merge the adapter into the weights with peft, and start from the merged weights"
            )
    return LoRA(
        rank=values["r"],
        alpha=float(values["lora_alpha"]),
        dropout=values.get("lora_dropout") or 0.0,
        target_modules=_as_tuple(values["target_modules"]),
        exclude_modules=_as_tuple(values.get("exclude_modules")),
        modules_to_save=_as_tuple(values.get("modules_to_save")),
    )


def base_model(folder: str | os.PathLike[str]) -> str | None:
    """Return the base model in peft's adapter_config.json: a folder, or "owner/name[@revision]" on the hub.

    Call `adapter_options` first, which checks the file.
    """
    values = json.loads((Path(folder) / CONFIG).read_text(encoding="utf-8"))
    base, revision = values.get("base_model_name_or_path"), values.get("revision")
    return base if not base or os.path.exists(base) or not revision else f"{base}@{revision}"


def adapter_config(model: nn.Module, base_model: str | None = None) -> dict[str, Any]:
    """Return the adapter_config.json of the adapters of `model`; `base_model` is a folder, or "owner/name[@revision]".

    Raises:
        ModelError: there are no adapters, or they differ in rank or scaling.
    """
    low_ranks = set(_low_ranks(model).values())
    if len(low_ranks) != 1:
        adapters = " and ".join(
            f"rank {each.rank} with scaling {each.scaling:g}" for each in sorted(low_ranks)
        )
        raise ModelError(
            f"peft's files hold adapters of one rank and one scaling, but the model has "
            f"{(adapters and adapters + ': give every adapter the same rank and alpha') or 'no adapters'}"
        )
    (low_rank,) = low_ranks
    modules = named_adapted(model)
    alpha = low_rank.scaling * low_rank.rank
    dropout: Any = next(
        (m._modules["lora_dropout"] for m in modules.values() if "lora_dropout" in m._modules), None
    )
    saved = {name.rpartition(".")[0] for name in trained_names(model) if not is_factor(name)}
    repository = None if base_model is None else repository_of(base_model)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if hasattr(model, "lm_head") else None,
        "base_model_name_or_path": repository.name if repository else base_model,
        "revision": repository.revision if repository else None,
        "r": low_rank.rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": 0.0 if dropout is None else dropout.p,
        "target_modules": _target_modules(model, list(modules)),
        "modules_to_save": sorted(saved) or None,
        "fan_in_fan_out": any(map(is_transposed, modules.values())),
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }


def trained_names(model: nn.Module) -> dict[str, None]:
    """Return the names (in the state dict) of the tensors in an adapter's files: factors and other trained parameters."""
    # Take requires_grad from the parameters, not from the state dict: there, parameters that FSDP2 gathers in float8 are
    # new tensors whose requires_grad is False.
    parameters = model.named_parameters(remove_duplicate=False)
    trained = {without_wrappers(name) for name, parameter in parameters if parameter.requires_grad}
    return {name: None for name in model.state_dict() if is_factor(name) or name in trained}


def peft_name(name: str) -> str:
    """Return a parameter's name in peft's files: "base_model.model.q_proj.lora_A.weight" for "q_proj.lora_A"."""
    return f"{_PREFIX}{name}.weight" if is_factor(name) else f"{_PREFIX}{name}"


def _low_ranks(model: nn.Module) -> dict[str, LowRank]:
    adapters = {name: low_rank_of(module) for name, module in named_adapted(model).items()}
    return {name: low_rank for name, low_rank in adapters.items() if low_rank is not None}


def _target_modules(model: nn.Module, names: list[str]) -> list[str]:
    """Return the last components of the modules' names if they match no other module; else the full names."""
    suffixes = {name.rpartition(".")[2] for name in names}
    candidates = [without_wrappers(name) for name, module in model.named_modules() if takes_adapter(module)]
    matched = {name for name in candidates if name.rpartition(".")[2] in suffixes}
    return sorted(suffixes) if matched == set(names) else sorted(names)


def _as_tuple(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, str) else tuple(sorted(value))
