"""Strict conversion of Linear modules to torchao's `Float8Linear`. Start at `convert_to_float8`.

torchao does not report modules that were filtered out, a filter that matches no module, or a parent that passes the weight
to a fused kernel in high precision. The functions here report or refuse each of these.
"""

import dataclasses
from collections import Counter
from dataclasses import dataclass

import torch
from torch import nn

from titanplans.config import Float8
from titanplans.errors import ParallelError
from titanplans.extras import is_installed, missing_library
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
"""torchtitan's special filter: do not convert modules that torchao's measurements show to be slower in float8."""

_CAPABILITY = {"tensorwise": (8, 9), "rowwise": (9, 0), "rowwise_with_gw_hp": (9, 0)}
"""Lowest CUDA capability by recipe: tensorwise uses cuBLAS (Ada), the rowwise recipes CUTLASS (Hopper)."""


@dataclass(frozen=True)
class Conversion:
    """Which Linear modules of a model were converted, and why the others were not."""

    recipe: Recipe
    emulated: bool
    converted: tuple[str, ...]
    """Fully qualified names."""

    filtered: dict[str, str]
    """Names of modules that were not converted, each with the reason."""

    unfused: tuple[str, ...]
    """Parents of converted modules whose fused kernel used the module's weight. The kernel was switched off, so they now
    call the module."""


def convert_to_float8(model: nn.Module, options: Float8, device_type: str = "cpu") -> Conversion:
    """Convert the Linear modules of `model` to float8, in place. Call it before a plan, torch.compile and FSDP2 are applied.

    Names and parameters do not change. Parameters may be on meta.

    Args:
        model: any module.
        options: the recipe, the filters, and whether FSDP2 will gather in float8.
        device_type: the device type that the model will run on.

    Raises:
        ParallelError: an option can't be honoured, or no module would be converted. The model is unchanged.
    """
    check_float8_options(options, device_type)
    if converted := float8_linears(model):
        raise ParallelError(f"{next(iter(converted))} is converted to float8 already: build the model again")
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    stays_float32 = keeps_float32(model, torch.bfloat16)
    filtered = {name: "the model keeps it in float32" for name in linears if stays_float32(f"{name}.weight")}
    filtered |= _filtered(linears, options)
    chosen = {}
    for name, module in linears.items():
        if name in filtered:
            continue
        if reason := _unaligned(module):
            if not options.filter_unaligned:
                raise options.error(
                    "filter_fqns",
                    f"{name} (Linear, {reason}) is not filtered, and float8 products need multiples of {ALIGNMENT}: "
                    f"add {name.rpartition('.')[2]!r}, or filter all such modules with filter_unaligned = true "
                    "(--float8-filter-unaligned)",
                )
            filtered[name] = f"{reason}: not a multiple of {ALIGNMENT}"
            continue
        _check_plain(name, module, options)
        chosen[name] = module
    parent_counts = Counter(child for parent in model.modules() for child in parent._modules.values())
    if shared := next((name for name, module in chosen.items() if parent_counts[module] > 1), None):
        raise options.error(
            "filter_fqns",
            f"{shared} is one module under two names, and torchao would convert it only under one: add it to the filter",
        )
    if not chosen:
        raise ParallelError(
            f"float8: no Linear of {type(model).__name__} remains after the filters: remove one, or train without float8"
        )
    if options.enable_fsdp_float8_all_gather:
        _check_untied(model, chosen)
    unfused = unfuse(model, chosen)
    _swap(model, chosen, options)
    assert options.recipe_name is not None  # checked above
    return Conversion(options.recipe_name, options.emulate, tuple(chosen), filtered, unfused)


def check_float8_options(options: Float8, device_type: str) -> None:
    """Check that this machine can honour `options`.

    Raises:
        ParallelError: torchao is not installed, `recipe_name` is not set, or the GPU has no kernels for the recipe.
    """
    if not is_installed("torchao"):
        raise missing_library("torchao", f"float8 (recipe_name = {options.recipe_name!r})")
    if options.recipe_name is None:
        raise options.error("recipe_name", f"set it to one of {', '.join(RECIPES)}")
    if device_type == "cuda" and not options.emulate and torch.version.hip is None:
        has, needs = torch.cuda.get_device_capability(), _CAPABILITY[options.recipe_name]
        if has < needs:
            raise options.error(
                "recipe_name",
                f"it needs CUDA capability {needs[0]}.{needs[1]}, and {torch.cuda.get_device_name()} has {has[0]}.{has[1]}: "
                "set emulate to true to try it out, or train without float8",
            )


def _filtered(linears: dict[str, nn.Linear], options: Float8) -> dict[str, str]:
    """Return the names that `filter_fqns` matches, each with the filter that matched."""
    filtered = {}
    for pattern in options.filter_fqns:
        if pattern == SMALL:
            if options.recipe_name == "rowwise_with_gw_hp":
                raise options.error(
                    "filter_fqns",
                    f"torchao has no measurements for {SMALL} with {options.recipe_name}: list the small modules by name, "
                    "or use another recipe",
                )
            gains = gains_by_float8(str(options.recipe_name))
            small = {n: _unaligned(m) or "too small to gain" for n, m in linears.items() if not gains(m, n)}
            filtered |= {name: f"{SMALL}: {why}" for name, why in small.items()}
            continue
        matched = [name for name in linears if pattern in name]
        if not matched or not pattern:
            last_names = list(dict.fromkeys(name.rpartition(".")[2] for name in linears))
            raise options.error(
                "filter_fqns",
                f"{pattern!r} is part of no Linear's name; there are {', '.join(last_names)}, and {SMALL}",
            )
        filtered |= {name: f"filter_fqns has {pattern!r}" for name in matched}
    return filtered


def _unaligned(module: nn.Linear) -> str:
    sizes = {"in": module.in_features, "out": module.out_features}
    return ", ".join(f"{size} {side}" for side, size in sizes.items() if size % ALIGNMENT)


def _check_plain(name: str, module: nn.Linear, options: Float8) -> None:
    """Refuse a module with hooks or a forward that is not `nn.Linear`'s, which the conversion would drop."""
    if type(module).forward is not nn.Linear.forward:
        raise options.error(
            "filter_fqns",
            f"{name} is a {type(module).__name__}, whose forward float8 would replace: add "
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
                f"{' and '.join(names)} are one tensor, which FSDP2's float8 all-gather would untie: add "
                f"'{converted[0].split('.')[-2]}' to filter_fqns, or set enable_fsdp_float8_all_gather to false"
            )


def _swap(model: nn.Module, chosen: dict[str, nn.Linear], options: Float8) -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = dataclasses.replace(
        Float8LinearConfig.from_recipe_name(str(options.recipe_name)),
        emulate=options.emulate,
        enable_fsdp_float8_all_gather=options.enable_fsdp_float8_all_gather,
    )
    # torchao's new modules are in training mode.
    is_training = {name: module.training for name, module in chosen.items()}
    convert_to_float8_training(model, config=config, module_filter_fn=lambda module, name: name in chosen)
    for name, mode in is_training.items():
        model.get_submodule(name).training = mode


def check_calls(model: nn.Module) -> None:
    """Make the first forward of `model` raise a ParallelError if a parent runs without calling its converted module.

    Such a parent passes the weight to a fused kernel, which silently computes in high precision.
    """
    BypassCheck(model, float8_linears(model), _bypassed_error)


def refuse_read_weights(model: nn.Module) -> None:
    """Refuse converted modules if their parent, according to its source code, uses their weight instead of calling them.

    This is for compiled blocks, whose calls `check_calls` can't observe.

    Raises:
        ParallelError: names the module and its parent.
    """
    if bypassed := find_bypassed(model, float8_linears(model)):
        raise _bypassed_error(bypassed)


def _bypassed_error(bypassed: list[Bypassed]) -> ParallelError:
    name, owner, parent = bypassed[0]
    last_name = name.rpartition(".")[2]
    return ParallelError(
        f"{name} is converted to float8, but its parent {owner} ({type(parent).__name__}) uses its weight in high "
        "precision instead of calling it: switch the fused kernel off in the model's config, or leave the module out "
        "with "
        f'filter_fqns = ["{last_name}"]'
    )


def keep_plain_between_graphs(model: nn.Module) -> None:
    """Make plans gather in high precision in blocks with FLA modules, which are compiled into several graphs.

    The gradient of a float8 tensor that one graph passes to another is in high precision, and the compiler does not expect
    that. For example, GLA's `g_proj` uses the hidden states after the graph break at its kernel.
    """
    for block in find_decoder(model, required=False).blocks:
        if has_fla_module(block.module):
            for name in (*block.mixers, *block.mlps):
                keep_border_plain(
                    block.child(name), "its compiled graphs can't pass a float8 tensor to each other"
                )
