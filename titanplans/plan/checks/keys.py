"""Check that each key of a plan matches something in the model, and that each parameter is covered by a key."""

from collections import Counter
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle

from titanplans.errors import PlanError, either
from titanplans.plan.plan_styles import Plan
from titanplans.split.adapted import ADAPTERS, FACTORS, is_adapted, is_factor
from titanplans.split.converted import is_quantised_by_torchao
from titanplans.split.decoder import MIXERS, MLPS, Decoder, find_decoder, join, within
from titanplans.styles.base import Style, direct_parameters

if TYPE_CHECKING:
    from titanplans.plan.plan import TPPlan


def refuse_foreign_adapters(model: nn.Module) -> None:
    """Refuse adapters of peft, whose parameters have "lora_" in their names: no plan has keys for them."""
    for name, _ in model.named_parameters():
        if "lora_" in name and not is_factor(name):
            raise PlanError(f"parameter '{name}' belongs to an adapter, which no plan splits: {ADAPTERS}")


def check_keys(plan: Plan, model: nn.Module, source: "TPPlan") -> None:
    """Refuse keys that match nothing and values that are not styles; the error lists the names that a key could have."""
    modules = dict(model.named_modules(remove_duplicate=False))
    plan_name = type(source).__name__
    for key, style in plan.items():
        if not isinstance(style, ParallelStyle):
            raise PlanError(
                f"plan key '{key}' ({plan_name}) has {style!r}, which is not a style: a method of a plan returns the "
                "results of self.colwise() and the like, or another torch ParallelStyle"
            )
        if key in modules:
            continue
        path, _, last = key.rpartition(".")
        names_parameter = path in modules and modules[path]._parameters.get(last) is not None
        if names_parameter and isinstance(style, Style):
            continue
        if names_parameter:
            raise PlanError(
                f"plan key '{key}' ({plan_name}) names a parameter, which needs a style of titanplans, not "
                f"{type(style).__name__}: self.colwise(), self.replicated_in_region() and the like"
            )
        if path in modules and modules[path]._buffers.get(last) is not None:
            if isinstance(style, Style) and style.slices_buffers:
                continue
            raise PlanError(
                f"plan key '{key}' ({plan_name}) names a buffer, which is replicated: only self.colwise(), "
                "self.kv_colwise() and self.packed() give a rank a slice of it; remove the key"
            )
        parent = key
        while parent not in modules:
            parent = parent.rpartition(".")[0]
        children = [*dict(modules[parent].named_children()), *direct_parameters(modules[parent])]
        raise PlanError(
            f"plan key '{key}' ({plan_name}) matches no module and no parameter: "
            f"{parent or 'the model'} ({type(modules[parent]).__name__}) has {', '.join(children) or 'none'}"
            f"{_other_names(key, parent, model, source)}"
        )


def _other_names(key: str, parent: str, model: nn.Module, source: "TPPlan") -> str:
    """Return advice if the key names an MLP's projection by a name that this MLP does not use; else ""."""
    if parent in find_decoder(model, required=False).mlps and key.removeprefix(f"{parent}.") in (
        *source.mlp_in,
        source.mlp_out,
    ):
        return f": set mlp_in and mlp_out in {type(source).__name__} to its projections, or override mlp_plan"
    return ""


def check_coverage(
    plan: Plan, covered: Collection[str], foreign: Collection[str], model: nn.Module, plan_name: str
) -> None:
    """Refuse parameters that can't be split, or that no key covers: they would stay plain tensors among DTensors.

    Args:
        plan: the styles by key.
        covered: the names of parameters that have a layout.
        foreign: the keys with a foreign style. A foreign style declares no layouts, so a parameter that stays a plain tensor
            under such a style is found only after the style was applied.
        model: not split yet.
        plan_name: the name of the plan in errors.
    """
    uncovered: list[tuple[str, nn.Module, str]] = []
    count: Counter[str] = Counter()
    for name, module in model.named_modules():
        for param_name, param in module._parameters.items():
            if param is None:
                continue
            full_name = join(name, param_name)
            if isinstance(param, DTensor):
                raise PlanError(
                    f"parameter '{full_name}' is already a DTensor: apply a plan once, before FSDP"
                )
            if is_quantised_by_torchao(param):
                raise PlanError(
                    f"parameter '{full_name}' is torchao's {type(param).__name__}, whose quantised values and scales no "
                    "plan can split: apply the plan before quantize_, or train adapters over frozen weights in NF4 "
                    '(lora.quantize_base = "nf4")'
                )
            count[_with_wildcards(full_name)] += 1
            if not (full_name in covered or name in foreign or _follows(covered, name, module, param_name)):
                uncovered.append((name, module, param_name))
    if not uncovered:
        return
    uncovered_count = Counter(_with_wildcards(join(name, param_name)) for name, _, param_name in uncovered)
    decoder = find_decoder(model, required=False)
    keys_and_reasons: dict[str, tuple[str, str]] = {}
    for name, module, param_name in uncovered:
        full_name = join(name, param_name)
        pattern = _with_wildcards(full_name)
        # One pattern stands for all parameters that it matches, if none of them is covered.
        shorten = _with_wildcards if count[pattern] == uncovered_count[pattern] > 1 else str
        note = (
            f" (the style of '{shorten(name)}' is for the module's output and lays out no parameter)"
            if name in plan
            else ""
        )
        shape = tuple(module._parameters[param_name].shape)  # type: ignore[union-attr]
        description = f"'{shorten(full_name)}' {shape} of {type(module).__name__}{note}"
        if description not in keys_and_reasons:
            key = full_name if name in plan else name
            keys_and_reasons[description] = f"'{shorten(key)}'", _not_asked(plan, decoder, name)
    keys, reasons = (list(dict.fromkeys(texts)) for texts in zip(*keys_and_reasons.values(), strict=True))
    heads = {f"'{name}'": None for name, module, _ in uncovered if _makes_logits(module, model, decoder)}
    if heads:
        reasons.append(f". {', '.join(heads)} makes the logits: give it vocab_head() in model_plan")
    styles = (
        ". In a region use colwise() for a weight split by heads or width, split_norm() for a norm over such a width, "
        "replicated_in_region() for a parameter that all heads share; outside a region, replicated_on_stream()"
    )
    several = len(keys_and_reasons) > 1
    raise PlanError(
        f"parameter{'s' * several} {', '.join(keys_and_reasons)} {'are' if several else 'is'} covered by no key of "
        f"{plan_name}: add {', '.join(keys)} with a style{' each' * (len(keys) > 1)}"
        f"{styles * (len(heads) < len(keys))}{''.join(reasons)}"
    )


def _makes_logits(module: nn.Module, model: nn.Module, decoder: Decoder) -> bool:
    """Whether `module` has an output for each row of the embedding."""
    embedding: Any = None if decoder.embedding is None else model.get_submodule(decoder.embedding)
    return isinstance(module, nn.Linear) and getattr(embedding, "num_embeddings", None) == module.out_features


def _with_wildcards(name: str) -> str:
    """Replace each number in a name by `*`: the result is a key for all blocks, or for all experts."""
    return ".".join("*" if component.isdecimal() else component for component in name.split("."))


def _not_asked(plan: Plan, decoder: Decoder, name: str) -> str:
    """Explain why no plan method was asked for the module `name`, if its name is the reason; else ""."""
    for block in decoder.blocks:
        if name.startswith(f"{block.name}."):
            child = name.removeprefix(f"{block.name}.").partition(".")[0]
            path = join(block.name, child)
            if path in (*block.mixers, *block.mlps) or any(key == path or within(key, path) for key in plan):
                return ""
            return (
                f". attn_plan is called for a block's {either(MIXERS)}, mlp_plan for its {either(MLPS)}, and norms are "
                f"found by 'Norm' in their class name: return the keys of {child!r} from layer_plan(layer)"
            )
    return ""


def _follows(covered: Collection[str], name: str, module: nn.Module, param_name: str) -> bool:
    """Whether the parameter belongs to the adapter of a weight that has a layout."""
    return (
        is_adapted(module)
        and param_name in FACTORS
        and join(name, next(iter(direct_parameters(module)))) in covered
    )
