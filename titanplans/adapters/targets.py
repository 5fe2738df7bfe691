"""The modules that get an adapter, are quantised to NF4, or train without an adapter. Start at `target_modules`."""

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
"""peft's value of target_modules for every Linear, except the head and subclasses that override `forward`."""


def target_modules(model: nn.Module, options: LoRA) -> list[str]:
    """Return the names of the modules that get an adapter.

    Raises:
        OptionError: as in `add_adapters`.
    """
    linears = {name: module for name, module in model.named_modules() if takes_adapter(module)}
    reasons_left_out = left_out(model, options)

    def refuse(option: str):
        return lambda why: options.error(option, why)

    patterns = [pattern for pattern in options.target_modules if pattern != ALL]
    for pattern in patterns:
        _refuse_others(model, pattern, linears, options)
    targets = set(select(patterns, list(linears), refuse("target_modules"), "Linear module"))
    if ALL in options.target_modules:
        targets |= {name for name in linears if name not in reasons_left_out}
    excluded = set(select(options.exclude_modules, list(linears), refuse("exclude_modules"), "Linear module"))
    chosen = [name for name in linears if name in targets and name not in excluded]
    if not chosen:
        raise options.error(
            "target_modules", "no module is left for an adapter: name more modules, or exclude fewer"
        )
    return chosen


def to_quantise(model: nn.Module, options: LoRA, chosen: list[str]) -> list[str]:
    """Return the names of the modules in `chosen` whose weights are quantised to NF4: none unless the option is set, else
    all but the head.

    Raises:
        OptionError: a weight can't be quantised.
    """
    if options.quantize_base is None:
        return []
    head, tied = (
        find_decoder(model, required=False).head,
        {n for group in tied_parameters(model) for n in group},
    )
    quantised = [name for name in chosen if name != head]
    for name in quantised:
        module: Any = model.get_submodule(name)
        if type(module) is not nn.Linear:
            why = f"is a {type(module).__name__}, and only the weights of plain Linear modules can be in NF4"
        elif module.in_features % BLOCK:
            why = f"has a weight {tuple(module.weight.shape)}, whose inputs are not a multiple of {BLOCK}"
        elif f"{name}.weight" in tied:
            why = "has a tied weight"
        else:
            continue
        raise options.error("quantize_base", f"{name} {why}: exclude it with lora.exclude_modules")
    return quantised


def left_out(model: nn.Module, options: LoRA) -> dict[str, str]:
    """Return the Linear modules, by name, that "all-linear" does not select, and why."""
    head, reasons = find_decoder(model, required=False).head, {}
    for name, module in model.named_modules():
        if not takes_adapter(module):
            continue
        overrides_forward = (
            isinstance(module, nn.Linear)
            and type(module).forward is not nn.Linear.forward
            and not is_float8(module)
        )
        if ALL not in options.target_modules:
            reasons[name] = "not among target_modules"
        elif name == head:
            reasons[name] = "the head"
        elif overrides_forward:
            reasons[name] = f"{type(module).__name__} overrides forward"
        elif any(matches(pattern, name) for pattern in options.exclude_modules):
            reasons[name] = "among exclude_modules"
    return reasons


def _refuse_others(model: nn.Module, pattern: str, linears: dict[str, nn.Module], options: LoRA) -> None:
    """Raise OptionError if `pattern` matches modules or parameters that take no adapter, and no Linear."""
    if any(matches(pattern, name) for name in linears):
        return
    for name, module in model.named_modules():
        if matches(pattern, name):
            inner = [other for other in linears if other.startswith(f"{name}.")]
            instead = f'; for the Linear modules in it, write "{name}.*"' if inner else ""
            raise options.error(
                "target_modules",
                f"{name} is a {type(module).__name__}, and only Linear modules can have adapters{instead}",
            )
    for name, param in model.named_parameters():
        if matches(pattern, name):
            owner = type(model.get_submodule(name.rpartition(".")[0])).__name__
            raise options.error(
                "target_modules",
                f"{name} {tuple(param.shape)} is a parameter of {owner}, and only Linear modules can have adapters: "
                "to train it without an adapter, name its module in modules_to_save (peft's target_parameters are "
                "not supported)",
            )


def modules_to_save(model: nn.Module, options: LoRA, chosen: list[str]) -> list[str]:
    """Return the names of the parameters that train without an adapter.

    Raises:
        OptionError: a name or pattern matches no module with parameters, a module with an adapter, or a tied weight.
    """
    if not options.modules_to_save:
        return []
    modules = [
        name for name, module in model.named_modules() if name and next(module.parameters(), None) is not None
    ]

    def refuse(why: str):
        return options.error("modules_to_save", why)

    saved = select(options.modules_to_save, modules, refuse, "module with parameters")
    for name in saved:
        adapted = next((other for other in chosen if f"{other}.".startswith(f"{name}.")), None)
        if adapted is not None:
            raise refuse(
                f"{adapted} already gets an adapter: leave it out of target_modules or of modules_to_save"
            )
    parameters = dict(model.named_parameters(remove_duplicate=False))
    names = [name for name in parameters if any(name.startswith(f"{module}.") for module in saved)]
    for group in tied_parameters(model):
        if any(name in names for name in group):
            raise refuse(
                f"{' and '.join(group)} are one tensor, which peft's files would take apart: leave the module out, or untie "
                "them in the model's config"
            )
    return names
