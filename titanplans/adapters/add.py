"""Adapters of Linear modules, added to a model that is not split yet, and frozen parts."""

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
    """What an adapter was added to."""

    options: LoRA
    modules: tuple[str, ...]
    """Fully qualified names."""

    left: dict[str, str]
    """Linear modules without one, and why."""

    saved: tuple[str, ...]
    """Parameters of the modules that train as they are."""

    trained: int
    """Numbers that train."""

    frozen: int
    """Numbers that don't; of a weight in NF4 those that it stands for."""

    unfused: tuple[str, ...]
    """Modules that called a fused kernel on the weight of one with an adapter, and now call the module."""


def add_adapters(model: nn.Module, options: LoRA, *, seed: int = 0) -> Adapters:
    """Give Linear modules of `model` low-rank adapters, in place, and freeze all else.

    After a conversion to float8, before a plan, compile and data parallelism. `module.weight` keeps its name; the
    module gains `module.lora_A` [rank, inputs] and `module.lora_B` [outputs, rank], of its dtype.

    Args:
        model: any module, on meta or not. On meta the adapters get values where all parameters do
            (`titanplans.modeling.initialize`).
        options: rank, alpha, dropout, and which modules.
        seed: of the adapters' initial values, which are peft's: uniform lora_A, zero lora_B.

    Raises:
        OptionError: a name or pattern matches nothing, or something that takes no adapter.
        ParallelError: the model is split already, or has adapters. All before anything is changed.
    """
    if options.rank is None:
        raise options.error("rank", "give one, such as 8: it is what switches adapters on")
    if any(isinstance(param, DTensor) for param in model.parameters()):
        raise ParallelError(
            "the model is split already: add adapters before apply_plan, parallelize and FSDP"
        )
    if adapted(model) or any(
        "lora_" in name and name.rpartition(".")[2] in FACTORS for name, _ in model.named_parameters()
    ):
        raise ParallelError("the model has adapters already: add them once")
    chosen = target_modules(model, options)
    saved = modules_to_save(model, options, chosen)
    low_rank = LowRank(options.rank, (options.alpha or options.rank) / options.rank)
    unfused = unfuse(model, chosen)
    kept = to_quantise(model, options, chosen)
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
    parameters = dict(model.named_parameters())
    for name in kept:
        keep_quantised(model.get_submodule(name))  # type: ignore[arg-type]
    for name in saved:
        parameters[name].requires_grad_(True)
    model.__dict__[_BYPASS_CHECK] = BypassCheck(model, chosen, _bypassed_error)
    counts = {True: 0, False: 0}
    for param in parameters.values():
        counts[param.requires_grad] += param.numel()
    left = {name: why for name, why in left_out(model, options).items() if name not in chosen}
    return Adapters(options, tuple(chosen), left, tuple(saved), counts[True], counts[False], unfused)


def check_before_compile(model: nn.Module) -> None:
    """Refuse an adapter whose Linear's weight its parent reads, by the source: a compiled block can't be watched as it runs.

    Raises:
        ParallelError: names the modules.
    """
    if (check := model.__dict__.get(_BYPASS_CHECK)) is not None:
        check.remove()
    if bypassed := find_bypassed(model, adapted(model)):
        raise _bypassed_error(bypassed)


def _bypassed_error(bypassed: list[Bypassed]) -> ParallelError:
    name, owner, parent = bypassed[0]
    ends = dict.fromkeys(end_of(linear.name) for linear in bypassed)
    return ParallelError(
        f"{name} has an adapter, and its parent {owner} ({type(parent).__name__}) does not call it but reads its weight, "
        "without the adapter: switch the fused kernel off in the model's config, or leave it out by "
        f"lora.exclude_modules = {show(list(ends))}"
    )


def freeze(model: nn.Module, patterns: tuple[str, ...], refuse=ParallelError) -> int:
    """Let the parameters that `patterns` name keep their values; return how many numbers they are.

    Args:
        model: any module, before data parallelism.
        patterns: names of parameters or of modules, their ends, or patterns of whole names.
        refuse: makes the error from the reason.

    Raises:
        ParallelError: a pattern matches nothing, or nothing is left to train.
    """
    every = dict(model.named_parameters(remove_duplicate=False))
    of_modules = {
        name: [p for p in every if p.startswith(f"{name}.")] for name, _ in model.named_modules() if name
    }
    names = [*of_modules, *every]
    for found in select(patterns, names, refuse, "module and no parameter"):
        for name in of_modules.get(found, [found]):
            every[name].requires_grad_(False)
    if not any(param.requires_grad for param in every.values()):
        raise refuse("nothing is left to train: freeze less")
    return sum(param.numel() for param in model.parameters() if not param.requires_grad)
