"""Adapters of Linear modules, added to a model that is not split yet, and frozen parts."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from titanplans.config import LoRA
from titanplans.errors import ParallelError
from titanplans.parallel.adapters.names import matches, select
from titanplans.parallel.called import Calls, read_weights, unfuse
from titanplans.tensor_parallel.checks import tied_parameters
from titanplans.tensor_parallel.decoder import find_decoder
from titanplans.tensor_parallel.float8 import is_float8
from titanplans.tensor_parallel.low_rank import FACTORS, LowRank, adapted, add_factors, draw_factor, is_factor

ALL = "all-linear"
"""A word among target_modules, peft's: every Linear but the head, and classes with a forward of their own."""


_CALLS = "_adapter_calls"


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
    """Numbers that don't."""

    unfused: tuple[str, ...]
    """Modules that called a fused kernel on the weight of one with an adapter, and now call the module."""


def add_adapters(model: nn.Module, options: LoRA, *, seed: int = 0) -> Adapters:
    """Give Linear modules of `model` low-rank adapters, in place, and freeze all else.

    After a conversion to float8, before a plan, compile and data parallelism. `module.weight` keeps its name; beside it
    stand `module.lora_A` [rank, inputs] and `module.lora_B` [outputs, rank], of its dtype.

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
    for name in saved:
        parameters[name].requires_grad_(True)
    model.__dict__[_CALLS] = Calls(model, chosen, _read_weight)
    counts = {True: 0, False: 0}
    for param in parameters.values():
        counts[param.requires_grad] += param.numel()
    left = {name: why for name, why in _left(model, options).items() if name not in chosen}
    return Adapters(options, tuple(chosen), left, tuple(saved), counts[True], counts[False], unfused)


def check_before_compile(model: nn.Module) -> None:
    """Refuse an adapter whose Linear's weight its parent reads, by the source: a compiled block can't be watched as it runs.

    Raises:
        ParallelError: names the modules.
    """
    if (calls := model.__dict__.get(_CALLS)) is not None:
        calls.remove()
    for found in read_weights(model, adapted(model)):
        raise _read_weight(*found)


def _read_weight(name: str, owner: str, parent: nn.Module) -> ParallelError:
    own = name.rpartition(".")[2]
    return ParallelError(
        f"{name} has an adapter, and its parent {owner} ({type(parent).__name__}) does not call it but reads its weight, "
        "without the adapter: switch the fused kernel off in the model's config, or leave it out by "
        f'lora.exclude_modules = ["{own}"]'
    )


def target_modules(model: nn.Module, options: LoRA) -> list[str]:
    """Return the names of the modules that get an adapter.

    Raises:
        OptionError: as `add_adapters`.
    """
    linears = {name: module for name, module in model.named_modules() if takes_adapter(module)}
    left = _left(model, options)

    def refuse(option: str):
        return lambda why: options.error(option, why)

    words = [word for word in options.target_modules if word != ALL]
    for word in words:
        _refuse_others(model, word, linears, options)
    found = set(select(words, list(linears), refuse("target_modules"), "Linear module"))
    if ALL in options.target_modules:
        found |= {name for name in linears if name not in left}
    excluded = set(select(options.exclude_modules, list(linears), refuse("exclude_modules"), "Linear module"))
    chosen = [name for name in linears if name in found and name not in excluded]
    if not chosen:
        raise options.error("target_modules", "no module is left for an adapter: name more, or exclude fewer")
    return chosen


def _left(model: nn.Module, options: LoRA) -> dict[str, str]:
    """Return the Linear modules that "all-linear" does not stand for, and why."""
    head, left = find_decoder(model, required=False).head, {}
    for name, module in model.named_modules():
        if not takes_adapter(module):
            continue
        own = (
            isinstance(module, nn.Linear)
            and type(module).forward is not nn.Linear.forward
            and not is_float8(module)
        )
        if ALL not in options.target_modules:
            left[name] = "not among target_modules"
        elif name == head:
            left[name] = "the head"
        elif own:
            left[name] = f"{type(module).__name__} has a forward of its own"
        elif any(matches(word, name) for word in options.exclude_modules):
            left[name] = "among exclude_modules"
    return left


def takes_adapter(module: nn.Module) -> bool:
    """Whether `module` is a Linear, or GPT-2's Conv1D, which is one with its weight transposed."""
    return isinstance(module, nn.Linear) or (type(module).__name__ == "Conv1D" and hasattr(module, "nf"))


def _refuse_others(model: nn.Module, word: str, linears: dict[str, nn.Module], options: LoRA) -> None:
    """Refuse a word for something that is there and takes no adapter."""
    if any(matches(word, name) for name in linears):
        return
    for name, module in model.named_modules():
        if matches(word, name):
            inner = [other for other in linears if other.startswith(f"{name}.")]
            instead = f'; it holds such: "{name}.*"' if inner else ""
            raise options.error(
                "target_modules",
                f"{name} is a {type(module).__name__}, and adapters are of Linear modules{instead}",
            )
    for name, param in model.named_parameters():
        if matches(word, name):
            owner = type(model.get_submodule(name.rpartition(".")[0])).__name__
            raise options.error(
                "target_modules",
                f"{name} {tuple(param.shape)} is a parameter of {owner}, and adapters are of Linear modules; to train it as "
                "it is, name its module in modules_to_save",
            )


def modules_to_save(model: nn.Module, options: LoRA, chosen: list[str]) -> list[str]:
    """Return the names of the parameters that train as they are.

    Raises:
        OptionError: a name or pattern matches no module with parameters, or one with an adapter; or a tied weight.
    """
    if not options.modules_to_save:
        return []
    modules = [
        name for name, module in model.named_modules() if name and next(module.parameters(), None) is not None
    ]

    def refuse(why: str):
        return options.error("modules_to_save", why)

    found = select(options.modules_to_save, modules, refuse, "module with parameters")
    for name in found:
        inside = next((other for other in chosen if f"{other}.".startswith(f"{name}.")), None)
        if inside is not None:
            raise refuse(f"{inside} gets an adapter already: leave it out of one of the two")
    every = dict(model.named_parameters(remove_duplicate=False))
    names = [name for name in every if any(name.startswith(f"{module}.") for module in found)]
    tied = {name: group[0] for group in tied_parameters(model) for name in group}
    return list(dict.fromkeys(tied.get(name, name) for name in names))


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


def trained_names(model: nn.Module) -> list[str]:
    """Return the names of an adapter's parameters: the factors, and what trains beside them."""
    return [name for name, param in model.named_parameters() if param.requires_grad or is_factor(name)]
