"""Find the modules that an `ActivationCheckpoint` recomputes, and wrap them in torch's non-reentrant checkpoint."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from titanplans.config import ActivationCheckpoint
from titanplans.errors import ParallelError
from titanplans.parallel.activation_checkpoint.keep_mixer import Kept, keep_modules
from titanplans.parallel.activation_checkpoint.operators import check_operators, keep_operators
from titanplans.split.decoder import find_block, find_decoder
from titanplans.text import class_name
from titanplans.torch_private.modules import ActivationWrapper, checkpoint_wrapper

_BUDGET = "_activation_memory_budget"

_WHY_NOTHING = {
    "selective": "each of its lists of blocks is shorter than that number",
    "mlp": "none of its blocks has an MLP under one of the usual names",
    "keep_mixer": "none of its blocks has a token mixer under one of the usual names",
}
"""Why a mode may find no module to recompute in a model that has blocks."""


def apply_activation_checkpointing(
    model: nn.Module, options: Any, dump_folder: str = "", names: Sequence[str] | None = None
) -> None:
    """Apply activation checkpointing to the blocks of `model`, in place; names in state dicts do not change.

    Args:
        model: the model, before it is compiled.
        options: an `ActivationCheckpoint`, or a torchtitan ActivationCheckpointing.Config.
        dump_folder: folder for torch's plot of memory budgets (`visualize_memory_budget_pareto`).
        names: for a pipeline stage, the modules to recompute. They were found in the unsplit model, because a policy such
            as "every second block" counts the blocks of all stages. None: find the modules in `model`.

    Raises:
        PlanError, ParallelError: as `check_activation_checkpointing`, before `model` is changed.
    """
    if names is None:
        is_ours = isinstance(options, ActivationCheckpoint)
        names = check_activation_checkpointing(model, options) if is_ours else []
    # A recomputed block would append its keys and values to the cache a second time.
    _switch_cache_off(model)
    if not isinstance(options, ActivationCheckpoint):
        # torchtitan's policies wrap the children of an attribute `layers`.
        for layers in dict.fromkeys(name.rpartition(".")[0] for name in find_decoder(model).names):
            blocks = nn.Module()
            blocks.layers = model.get_submodule(layers)
            options.build(dump_folder=dump_folder).apply(blocks)
        return
    wrapped: dict[str, Any] = {
        name: getattr(options, name)
        for name in ("preserve_rng_state", "determinism_check", "early_stop", "debug")
    }
    for name in names:
        module = model.get_submodule(name)
        if options.mode == "memory_budget":
            module.__dict__[_BUDGET] = _budget_settings(options, dump_folder)
            continue
        if options.mode == "keep_mixer":
            for mixer in find_block(module, name).mixers:
                _replace(model, mixer, partial(Kept, preserve_rng_state=options.preserve_rng_state))
            wrapped["context_fn"] = keep_modules
        elif keeps_operators(options):
            wrapped["context_fn"] = keep_operators(module, name, options)
        _replace(model, name, partial(checkpoint_wrapper, **wrapped))


def check_activation_checkpointing(model: nn.Module, options: ActivationCheckpoint) -> list[str]:
    """Return the names of the modules that are recomputed with `options`; `model` is not changed.

    Raises:
        ParallelError: no module is to be recomputed, an operator or a Linear is not found, or `model` already recomputes.
        PlanError: `model` has no list of blocks.
    """
    if options.mode == "none":
        return []
    if keeps_operators(options):
        check_operators(model, options)
    decoder = find_decoder(model, required=options.scope != "vision")
    if options.scope == "vision" and not decoder.towers:
        raise options.error(
            "scope", f'{class_name(model)} has no vision tower with blocks: set it to "all" or "language"'
        )
    lists = {"all": decoder.block_lists, "language": (decoder.names,), "vision": decoder.towers}
    every = (
        int(options.selective_ac_option)
        if options.mode == "selective" and not keeps_operators(options)
        else 1
    )
    recomputed = []
    for names in lists[options.scope]:
        for index, name in enumerate(names, start=1):
            block = find_block(model.get_submodule(name), name)
            if any(map(is_recomputed, block.module.modules())):
                raise ParallelError(
                    f"{class_name(model)} already has activation checkpointing: build the model again"
                )
            if options.mode == "mlp":
                recomputed += block.mlps
            elif index % every == 0 and (options.mode != "keep_mixer" or block.mixers):
                recomputed.append(name)
    # transformers renamed this attribute in version 5.
    flag = "is_activation_checkpointing"
    if getattr(model, flag if hasattr(model, flag) else "is_gradient_checkpointing", False):
        raise ParallelError(
            f"{class_name(model)} recomputes its blocks itself: call gradient_checkpointing_disable() before "
            "activation_checkpoint"
        )
    if not recomputed:
        why = _WHY_NOTHING.get(options.mode, "its lists of blocks are empty")
        raise options.error(
            "selective_ac_option" if every > 1 else "mode",
            f"it recomputes nothing of {class_name(model)}: {why}",
        )
    return recomputed


def keeps_operators(options: ActivationCheckpoint) -> bool:
    """Whether blocks are recomputed except for the outputs of some operators."""
    return options.mode == "selective" and options.selective_ac_option == "op"


def memory_budget(block: nn.Module) -> dict[str, Any] | None:
    """Return AOTAutograd's settings for the memory budget of `block`; None if it has no budget."""
    return block.__dict__.get(_BUDGET)


def is_recomputed(module: nn.Module) -> bool:
    """Whether `module` is wrapped in a checkpoint or has a memory budget."""
    return isinstance(module, ActivationWrapper) or memory_budget(module) is not None


def _switch_cache_off(model: nn.Module) -> None:
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    if getattr(text, "use_cache", False):
        text.use_cache = False


def _budget_settings(options: ActivationCheckpoint, dump_folder: str) -> dict[str, Any]:
    settings: dict[str, Any] = {"activation_memory_budget": options.memory_budget}
    if options.visualize_memory_budget_pareto:
        folder = Path(dump_folder) / "memory_budget_pareto"
        folder.mkdir(parents=True, exist_ok=True)
        settings |= {"visualize_memory_budget_pareto": True, "memory_budget_pareto_dir": str(folder)}
    return settings


def _replace(model: nn.Module, name: str, wrapper: Callable[[nn.Module], nn.Module]) -> None:
    """Replace the module called `name` by `wrapper(module)`."""
    parent, _, child = name.rpartition(".")
    model.get_submodule(parent).register_module(child, wrapper(model.get_submodule(name)))
