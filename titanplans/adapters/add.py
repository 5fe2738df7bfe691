"""Add adapters to the Linear modules of an unsplit model (`add_adapters`), and freeze parameters (`freeze`)."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from titanplans.adapters.low_rank import adapted, add_factors, draw_factor
from titanplans.adapters.names import end_of, select
from titanplans.adapters.targets import left_out, modules_to_save, target_modules, to_quantise
from titanplans.config import LoRA
from titanplans.errors import ParallelError
from titanplans.precision.nf4 import keep_quantised
from titanplans.split.adapted import FACTORS, LowRank
from titanplans.split.bypassed import BypassCheck, Bypassed, find_bypassed, unfuse
from titanplans.text import show

_BYPASS_CHECK = "_bypass_check"


@dataclass(frozen=True)
class Adapters:
    """The result of `add_adapters`."""

    options: LoRA
    modules: tuple[str, ...]
    """Fully qualified names of the modules with an adapter."""

    left_out: dict[str, str]
    """Linear modules without an adapter, and why."""

    saved: tuple[str, ...]
    """Parameters that train without an adapter (`modules_to_save`)."""

    trained: int
    """Number of trained elements."""

    frozen: int
    """Number of frozen elements; a weight in NF4 counts with its original shape."""

    unfused: tuple[str, ...]
    """Modules that passed the weight of a module with an adapter to a fused kernel, and now call the module instead."""


def add_adapters(model: nn.Module, options: LoRA, *, seed: int = 0) -> Adapters:
    """Add low-rank adapters to Linear modules of `model`, in place, and freeze all other parameters.

    Call it after a conversion to float8, and before a plan, compilation and data parallelism. `module.weight` keeps its
    name, and the module gets `module.lora_A` [rank, inputs] and `module.lora_B` [outputs, rank] in the weight's dtype.

    Args:
        model: any module, on meta or not. On meta, the adapters get their values together with the other parameters
            (`titanplans.modeling.initialize`).
        options: rank, alpha, dropout, and which modules get an adapter.
        seed: seed of the adapters' initial values, which have the same distribution as peft's: lora_A uniform, lora_B zero.

    Raises:
        OptionError: a name or pattern matches nothing, or matches a module that can't have an adapter.
        ParallelError: the model is split already, or has adapters already. Errors are raised before the model is changed.
    """
    if options.rank is None:
        raise options.error("rank", "set a rank, such as 8, to switch adapters on")
    if any(isinstance(param, DTensor) for param in model.parameters()):
        raise ParallelError(
            "the model is split already: add adapters before apply_plan, parallelize and FSDP"
        )
    if adapted(model) or any(
        "lora_" in name and name.rpartition(".")[2] in FACTORS for name, _ in model.named_parameters()
    ):
        raise ParallelError("the model has adapters already: call add_adapters only once")
    chosen = target_modules(model, options)
    saved = modules_to_save(model, options, chosen)
    low_rank = LowRank(options.rank, (options.alpha or options.rank) / options.rank)
    unfused = unfuse(model, chosen)
    quantised = to_quantise(model, options, chosen)
    model.requires_grad_(False)
    for name in chosen:
        module = model.get_submodule(name)
        add_factors(module, low_rank, options.dropout)
        for factor in FACTORS:
            param = module._parameters[factor]
            assert param is not None
            if not param.is_meta:
                with torch.no_grad():
                    param.copy_(draw_factor(f"{name}.{factor}", param.shape, seed))
    parameters = dict(model.named_parameters())  # before weights are quantised, for the counts
    for name in quantised:
        keep_quantised(model.get_submodule(name))  # type: ignore[arg-type]
    for name in saved:
        parameters[name].requires_grad_(True)
    # A parent that uses the weight without calling the module would skip the adapter. The first forward checks this.
    model.__dict__[_BYPASS_CHECK] = BypassCheck(model, chosen, _bypassed_error)
    counts = {True: 0, False: 0}
    for param in parameters.values():
        counts[param.requires_grad] += param.numel()
    reasons_left_out = {name: why for name, why in left_out(model, options).items() if name not in chosen}
    return Adapters(
        options, tuple(chosen), reasons_left_out, tuple(saved), counts[True], counts[False], unfused
    )


def check_before_compile(model: nn.Module) -> None:
    """Refuse adapters that a parent module skips, because it uses a Linear's weight without calling the Linear.

    Raises:
        ParallelError: names the modules.
    """
    # Check the parent's source code, since the forwards of a compiled block can't be checked while they run.
    if (check := model.__dict__.get(_BYPASS_CHECK)) is not None:
        check.remove()
    if bypassed := find_bypassed(model, adapted(model)):
        raise _bypassed_error(bypassed)


def _bypassed_error(bypassed: list[Bypassed]) -> ParallelError:
    name, owner, parent = bypassed[0]
    ends = dict.fromkeys(end_of(linear.name) for linear in bypassed)
    return ParallelError(
        f"{name} has an adapter, but its parent {owner} ({type(parent).__name__}) uses its weight without calling it, "
        "which would skip the adapter: switch the fused kernel off in the model's config, or exclude the module with "
        f"lora.exclude_modules = {show(list(ends))}"
    )


def freeze(model: nn.Module, patterns: tuple[str, ...], refuse=ParallelError) -> int:
    """Freeze the parameters that `patterns` match, and return the number of frozen elements in the model.

    Args:
        model: any module, before data parallelism.
        patterns: patterns as in `names.matches`, for names of parameters or of modules. If a module matches, all of its
            parameters are frozen.
        refuse: makes the error from the reason.

    Raises:
        ParallelError: a pattern matches nothing, or nothing is left to train.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    of_modules = {
        name: [p for p in parameters if p.startswith(f"{name}.")] for name, _ in model.named_modules() if name
    }
    names = [*of_modules, *parameters]
    for match in select(patterns, names, refuse, "module and no parameter"):
        for name in of_modules.get(match, [match]):
            parameters[name].requires_grad_(False)
    if not any(param.requires_grad for param in parameters.values()):
        raise refuse("nothing is left to train: freeze fewer parameters")
    return sum(param.numel() for param in model.parameters() if not param.requires_grad)
