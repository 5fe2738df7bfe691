"""What strict application refuses before anything moves: the plan against the model and the degree.

Each check raises a PlanError that names the plan key, the module, its class and the value, and
says what would work. They read shapes only, so they hold on meta and need no process group.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from plans.errors import PlanError, either
from plans.plan import Plan, TPOptions, TPPlan
from plans.structure import find_mixers, join
from plans.styles import Colwise, Rowwise, Style


class Size(NamedTuple):
    """Something that the degree has to divide."""

    what: str
    value: int
    where: str
    also: str = ""
    """What would work beside another degree."""


def check_keys(plan: Mapping[str, ParallelStyle], model: nn.Module, plan_name: str) -> None:
    """Refuse a key that names no module, with the names that stand there."""
    modules = dict(model.named_modules(remove_duplicate=False))
    for key in plan:
        if key in modules:
            continue
        parent = key
        while parent not in modules:
            parent = parent.rpartition(".")[0]
        children = [name for name, _ in modules[parent].named_children()]
        raise PlanError(
            f"plan key '{key}' ({plan_name}) matches no module: "
            f"{parent or 'the model'} ({type(modules[parent]).__name__}) holds {', '.join(children) or 'no modules'}"
        )


def check_coverage(plan: Mapping[str, ParallelStyle], model: nn.Module, plan_name: str) -> None:
    """Refuse a parameter that no key covers: it would stay a plain tensor beside DTensors."""
    for name, module in model.named_modules():
        for param_name, param in module._parameters.items():
            if param is None:
                continue
            if isinstance(param, DTensor):
                raise PlanError(
                    f"parameter '{join(name, param_name)}' is a DTensor already: apply a plan once, before FSDP"
                )
            if not _covered(plan, name, module, param_name):
                raise PlanError(
                    f"parameter '{join(name, param_name)}' {tuple(param.shape)} of {type(module).__name__} is covered by "
                    f"no key of {plan_name}: add '{name}' with a style. What is not split is replicated() inside a region, "
                    "sequence_parallel() outside"
                )


def _covered(plan: Mapping[str, ParallelStyle], name: str, module: nn.Module, param_name: str) -> bool:
    style = plan.get(name)
    if style is None:
        return False
    # A style that is not ours says nothing before it acts; what it left out is found afterwards.
    return param_name in style.layouts(module) if isinstance(style, Style) else True


def check_styles(plan: Mapping[str, ParallelStyle], model: nn.Module) -> None:
    """Refuse a style on a module on which it would be wrong."""
    for key, style in _ours(plan).items():
        module = model.get_submodule(key)
        if (reason := style.refusal(module)) is not None:
            raise PlanError(f"plan key '{key}' ({style} on {type(module).__name__}): {reason}")


def check_regions(plan: Mapping[str, ParallelStyle]) -> None:
    """Refuse a split module outside a region, and a region whose output would not be one sum of parts."""
    ours = _ours(plan)
    opened = {key: style for key, style in ours.items() if style.opens}
    for key, style in ours.items():
        if style.inside and not any(_within(key, region) for region in opened):
            raise PlanError(
                f"plan key '{key}' ({style}) stands in no region, so its input is not the whole sequence and its "
                "input's gradient is not summed: add **self.attn_input() or **self.mlp_input() to its plan"
            )
    for region, opener in opened.items():
        inside = {key: style for key, style in ours.items() if _within(key, region)}
        closers = [key for key, style in inside.items() if style.closes]
        # Styles that are not ours may do the splitting and the summing; they don't say.
        all_ours = not any(_within(key, region) for key in plan.keys() - ours.keys())
        if all_ours and not any(isinstance(style, Rowwise) for style in inside.values()):
            raise PlanError(
                f"plan key '{region}' ({opener}) opens a region without a rowwise() projection: every rank would "
                "compute the same output, and their sum is that many times too large: split it, or drop the region"
            )
        if all_ours and not closers and not opener.closes:
            raise PlanError(
                f"plan key '{region}' ({opener}) opens a region that nothing leaves, so its partial output is not "
                "summed: give its last projection rowwise(), or use attn_region() or mlp_region()"
            )
        if closers and opener.closes:
            raise PlanError(
                f"plan keys '{closers[0]}' and '{region}' both sum the output of the same region, which would count it "
                "once per rank: give the projection rowwise(reduce_output=False), or use attn_input() / mlp_input()"
            )


def check_mixers(plan: Mapping[str, ParallelStyle], model: nn.Module, options: TPOptions) -> None:
    """Refuse to let a token mixer see its rank's shard of the sequence only."""
    if not options.sequence_parallel:
        return
    ours = _ours(plan)
    for name, mixer in find_mixers(model).items():
        keys = [key for key in plan if key == name or _within(key, name)]
        gathered = any(style.opens and (key == name or _within(name, key)) for key, style in ours.items())
        if keys and ours.keys() >= set(keys) and not gathered:
            raise PlanError(
                f"plan key '{keys[0]}': the mixer {name} ({type(mixer).__name__}) stands in no region, so "
                "with sequence parallelism it would mix its rank's shard of the sequence only: "
                "split it in attn_input() or attn_region(), or set sequence_parallel = False"
            )


def _ours(plan: Mapping[str, ParallelStyle]) -> dict[str, Style]:
    return {key: style for key, style in plan.items() if isinstance(style, Style)}


def _within(key: str, region: str) -> bool:
    return key != region and (key.startswith(region + ".") or region == "")


def tied_parameters(model: nn.Module) -> list[list[str]]:
    """Return the names of parameters that are one tensor, group by group."""
    groups: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(param), []).append(name)
    return [names for names in groups.values() if len(names) > 1]


def check_tied(plan: Mapping[str, ParallelStyle], model: nn.Module) -> None:
    """Refuse to lay one tensor out in two ways."""
    for names in tied_parameters(model):
        layouts = {}
        for name in names:
            key, _, param_name = name.rpartition(".")
            if isinstance(style := plan[key], Style):
                layouts[name] = style.layouts(model.get_submodule(key))[param_name].placement
        if len(set(layouts.values())) > 1:
            raise PlanError(
                f"{' and '.join(f'{name} ({placement!r})' for name, placement in layouts.items())} are tied, so one "
                "tensor: give both keys styles of the same placement, or untie them in the model's config"
            )


def check_degree(sizes: Sequence[Size], options: TPOptions) -> None:
    """Refuse a degree that does not divide every size, with the degrees that do."""
    for size in sizes:
        if size.value % options.degree:
            largest = min(s.value for s in sizes)
            works = [d for d in range(1, largest + 1) if all(s.value % d == 0 for s in sizes)]
            raise PlanError(
                f"tensor_parallel_degree = {options.degree} does not divide {size.what} = {size.value} ({size.where}): "
                f"{either(works)} would work{size.also}"
            )


def sizes(plan: Plan, source: TPPlan, model: nn.Module, seq_len: int | None) -> Iterator[Size]:
    """Yield what the degree has to divide: heads first, since they say most, then every sharded dimension."""
    for name, mixer in find_mixers(model).items():
        if any(isinstance(style, Colwise) and _within(key, name) for key, style in plan.items()):
            counts = source.plan_of(mixer).heads(mixer)
            yield from (
                Size(what, value, f"{name}, {type(mixer).__name__}") for what, value in counts.items()
            )
    degree = source.options.degree
    if seq_len is not None and source.options.sequence_parallel:
        longer = f", or seq_len = {_next_multiple(seq_len, degree)}, or enable_sequence_parallel = false"
        yield Size("seq_len", seq_len, "sequence parallelism shards the sequence", longer)
    for key, style in _ours(plan).items():
        module = model.get_submodule(key)
        for name, layout in style.layouts(module).items():
            if isinstance(layout.placement, Shard):
                param = module._parameters[name]
                assert param is not None
                what, value = f"dimension {layout.placement.dim} of {name}", param.shape[layout.placement.dim]
                also = f", or a vocabulary of {_next_multiple(value, degree)}" if style.vocabulary else ""
                yield Size(what, value, f"{key}, {type(module).__name__}", also)


def _next_multiple(value: int, factor: int) -> int:
    return -(value // -factor) * factor
