"""Which modules get an adapter, keep their weight in NF4, or train as they are, by the options; what can't is refused."""

from typing import Any

from torch import nn

from titanplans.adapters.low_rank import takes_adapter
from titanplans.adapters.names import matches, select
from titanplans.config import LoRA
from titanplans.plan.checks.shared import tied_parameters
from titanplans.precision.nf4 import BLOCK
from titanplans.split.converted import is_float8
from titanplans.split.decoder import find_decoder

ALL = "all-linear"
"""A word among target_modules, peft's: every Linear but the head, and classes with a forward of their own."""


def target_modules(model: nn.Module, options: LoRA) -> list[str]:
    """Return the names of the modules that get an adapter.

    Raises:
        OptionError: as `add_adapters`.
    """
    linears = {name: module for name, module in model.named_modules() if takes_adapter(module)}
    left = left_out(model, options)

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


def to_quantise(model: nn.Module, options: LoRA, chosen: list[str]) -> list[str]:
    """Return the modules among `chosen` whose weights are kept in NF4: all but the head.

    Raises:
        OptionError: a weight can't be.
    """
    if options.quantize_base is None:
        return []
    head, tied = (
        find_decoder(model, required=False).head,
        {n for group in tied_parameters(model) for n in group},
    )
    kept = [name for name in chosen if name != head]
    for name in kept:
        module: Any = model.get_submodule(name)
        if type(module) is not nn.Linear:
            why = f"is a {type(module).__name__}, and weights in NF4 are of plain Linear modules"
        elif module.in_features % BLOCK:
            why = f"has a weight {tuple(module.weight.shape)}, which blocks of {BLOCK} inputs with one scale don't divide"
        elif f"{name}.weight" in tied:
            why = "has a tied weight"
        else:
            continue
        raise options.error("quantize_base", f"{name} {why}: leave it out by lora.exclude_modules")
    return kept


def left_out(model: nn.Module, options: LoRA) -> dict[str, str]:
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
                f"{name} {tuple(param.shape)} is a parameter of {owner}, and adapters are of Linear modules: peft adapts it "
                "by target_parameters, in files that are not read or written here; to train it as it is, name its module in "
                "modules_to_save",
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
    for group in tied_parameters(model):
        if any(name in names for name in group):
            raise refuse(
                f"{' and '.join(group)} are one tensor, which peft's files would take apart: leave the module out, or untie "
                "them in the model's config"
            )
    return names
