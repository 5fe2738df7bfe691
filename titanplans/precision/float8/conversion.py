"""Conversion of Linear modules to float8: torchao's, made strict.

torchao swaps each `nn.Linear` for a `Float8Linear`. It does not report modules that were filtered out, a filter
that matches none, or a parent whose fused kernel reads the weight in high precision. Here
each of these is reported or refused. How plans split a converted module is in `linear`; how FSDP2
gathers its weights is in `all_gather`.
"""

import dataclasses
import importlib.util
from collections import Counter
from dataclasses import dataclass

import torch
from torch import nn

from titanplans.config import Float8
from titanplans.errors import ParallelError
from titanplans.plan.checks.shared import tied_parameters
from titanplans.precision.kept_dtypes import keeps_float32
from titanplans.split.bypassed import BypassCheck, Bypassed, find_bypassed, unfuse
from titanplans.split.converted import (
    ALIGNMENT,
    RECIPES,
    Recipe,
    float8_linears,
    keep_border_plain,
)
from titanplans.split.decoder import find_decoder, has_fla_module
from titanplans.torch_private.modules import hooks_of
from titanplans.torch_private.torchao import gains_by_float8

SMALL = "auto_filter_small_kn"
"""torchtitan's special filter: leave out modules that by torchao's figures are slower in float8 than in bfloat16."""

_CAPABILITY = {"tensorwise": (8, 9), "rowwise": (9, 0), "rowwise_with_gw_hp": (9, 0)}
"""Lowest CUDA capability for the kernels of each recipe: Ada for cuBLAS's, Hopper for CUTLASS's."""


@dataclass(frozen=True)
class Conversion:
    """What became of each Linear of a model."""

    recipe: Recipe
    emulated: bool
    converted: tuple[str, ...]
    """Fully qualified names."""

    filtered: dict[str, str]
    """Those not converted, and why."""

    unfused: tuple[str, ...]
    """Parents that passed a converted module's weight to a fused kernel, and now call the module."""


def convert_to_float8(model: nn.Module, options: Float8, device_type: str = "cpu") -> Conversion:
    """Convert the Linear modules of `model` to float8; in place, before a plan, compile and FSDP.

    Names and parameters stay as they are, on meta or not.

    Args:
        model: any module.
        options: the recipe, which modules stay as they are, and how FSDP2 will gather weights.
        device_type: where it will run.

    Raises:
        ParallelError: an option can't be honoured; nothing would be converted. Before anything is changed.
    """
    check_float8_options(options, device_type)
    if found := float8_linears(model):
        raise ParallelError(f"{next(iter(found))} is converted to float8 already: build the model again")
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    kept = keeps_float32(model, torch.bfloat16)
    filtered = {name: "the model keeps it in float32" for name in linears if kept(f"{name}.weight")}
    filtered |= _filtered(linears, options)
    chosen = {}
    for name, module in linears.items():
        if name in filtered:
            continue
        if reason := _unaligned(module):
            if not options.filter_unaligned:
                raise options.error(
                    "filter_fqns",
                    f"{name} (Linear, {reason}) is not left out, and float8 products need multiples of {ALIGNMENT}: add "
                    f"{name.rpartition('.')[2]!r}, or leave out all such modules by filter_unaligned = true "
                    "(--float8-filter-unaligned)",
                )
            filtered[name] = f"{reason}: no multiple of {ALIGNMENT}"
            continue
        _check_plain(name, module, options)
        chosen[name] = module
    holders = Counter(child for parent in model.modules() for child in parent._modules.values())
    if twice := next((name for name, module in chosen.items() if holders[module] > 1), None):
        raise options.error(
            "filter_fqns", f"{twice} has two names, and torchao would convert it under one: add it"
        )
    if not chosen:
        raise ParallelError(
            f"float8: no Linear of {type(model).__name__} is left by the filters: drop one, or float8"
        )
    if options.enable_fsdp_float8_all_gather:
        _check_untied(model, chosen)
    unfused = unfuse(model, chosen)
    _swap(model, chosen, options)
    assert options.recipe_name is not None  # checked above
    return Conversion(options.recipe_name, options.emulate, tuple(chosen), filtered, unfused)


def check_float8_options(options: Float8, device_type: str) -> None:
    """Refuse options that can't be honoured on this machine.

    Raises:
        ParallelError: torchao is missing; there is no recipe; the GPU has no float8 kernels for it.
    """
    if importlib.util.find_spec("torchao") is None:
        raise options.error("recipe_name", "it needs torchao, which is not installed: pip install torchao")
    if options.recipe_name is None:
        raise options.error("recipe_name", f"take one of {', '.join(RECIPES)}")
    if device_type == "cuda" and not options.emulate and torch.version.hip is None:
        has, needs = torch.cuda.get_device_capability(), _CAPABILITY[options.recipe_name]
        if has < needs:
            raise options.error(
                "recipe_name",
                f"it needs CUDA capability {needs[0]}.{needs[1]}, and {torch.cuda.get_device_name()} has {has[0]}.{has[1]}: "
                "set emulate to true to try it out, or leave float8 out",
            )


def _filtered(linears: dict[str, nn.Linear], options: Float8) -> dict[str, str]:
    """Return the names that filters match, and the filter of each."""
    filtered = {}
    for part in options.filter_fqns:
        if part == SMALL:
            if options.recipe_name == "rowwise_with_gw_hp":
                raise options.error(
                    "filter_fqns",
                    f"torchao has no figures for {SMALL} under {options.recipe_name}: name the small modules, or "
                    "take another recipe",
                )
            gains = gains_by_float8(str(options.recipe_name))
            small = {n: _unaligned(m) or "too small to gain" for n, m in linears.items() if not gains(m, n)}
            filtered |= {name: f"{SMALL}: {why}" for name, why in small.items()}
            continue
        matched = [name for name in linears if part in name]
        if not matched or not part:
            ends = list(dict.fromkeys(name.rpartition(".")[2] for name in linears))
            raise options.error(
                "filter_fqns",
                f"{part!r} is part of no Linear's name; there are {', '.join(ends)}, and {SMALL}",
            )
        filtered |= {name: f"filter_fqns has {part!r}" for name in matched}
    return filtered


def _unaligned(module: nn.Linear) -> str:
    sizes = {"in": module.in_features, "out": module.out_features}
    return ", ".join(f"{size} {side}" for side, size in sizes.items() if size % ALIGNMENT)


def _check_plain(name: str, module: nn.Linear, options: Float8) -> None:
    """Refuse a module whose own forward or hooks the conversion would drop."""
    if type(module).forward is not nn.Linear.forward:
        raise options.error(
            "filter_fqns",
            f"{name} is a {type(module).__name__}, whose own forward float8 would replace: add "
            f"{name.rpartition('.')[2]!r}",
        )
    if hooks_of(module):
        raise ParallelError(
            f"{name} has hooks, which the conversion would drop: convert to float8 before plans and hooks"
        )


def _check_untied(model: nn.Module, chosen: dict[str, nn.Linear]) -> None:
    for names in tied_parameters(model):
        converted = [name for name in names if name.rpartition(".")[0] in chosen]
        if converted:
            raise ParallelError(
                f"{' and '.join(names)} are one tensor, which FSDP's float8 all-gather would take apart: leave "
                f"'{converted[0].split('.')[-2]}' out by filter_fqns, or set enable_fsdp_float8_all_gather to false"
            )


def _swap(model: nn.Module, chosen: dict[str, nn.Linear], options: Float8) -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = dataclasses.replace(
        Float8LinearConfig.from_recipe_name(str(options.recipe_name)),
        emulate=options.emulate,
        enable_fsdp_float8_all_gather=options.enable_fsdp_float8_all_gather,
    )
    modes = {name: module.training for name, module in chosen.items()}
    convert_to_float8_training(model, config=config, module_filter_fn=lambda module, name: name in chosen)
    for name, mode in modes.items():
        model.get_submodule(name).training = mode


def check_calls(model: nn.Module) -> None:
    """Let the first forward of `model` raise a ParallelError if a converted module is not called where its parent is.

    A parent that passes its weight to a fused kernel instead computes in high precision, silently.
    """
    BypassCheck(model, float8_linears(model), _bypassed_error)


def refuse_read_weights(model: nn.Module) -> None:
    """Refuse converted modules whose weight is read in the forward of their parent, by its source.

    For compiled blocks, which can't be watched as `check_calls` does.

    Raises:
        ParallelError: naming the module and its parent.
    """
    if bypassed := find_bypassed(model, float8_linears(model)):
        raise _bypassed_error(bypassed)


def _bypassed_error(bypassed: list[Bypassed]) -> ParallelError:
    name, owner, parent = bypassed[0]
    own = name.rpartition(".")[2]
    return ParallelError(
        f"{name} is converted to float8, and its parent {owner} ({type(parent).__name__}) does not call it but reads its "
        "weight, in high precision: switch the fused kernel off in the model's config, or leave it out by "
        f'filter_fqns = ["{own}"]'
    )


def keep_plain_between_graphs(model: nn.Module) -> None:
    """Let plans gather in high precision in FLA's blocks, which are compiled into several graphs.

    A float8 tensor that one graph hands to another has a gradient in high precision, which the compiler does not
    expect: GLA's `g_proj` reads the sequence after the graph break at its kernel.
    """
    for block in find_decoder(model, required=False).blocks:
        if has_fla_module(block.module):
            for part in filter(None, (block.mixer, block.mlp)):
                keep_border_plain(
                    block.child(part), "its compiled graphs can't hand a float8 tensor to each other"
                )
