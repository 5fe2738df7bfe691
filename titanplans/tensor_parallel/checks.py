"""What strict application refuses before anything moves: the plan against the model and the degree.

Each check raises a PlanError that names the plan key, the module, its class and the value, and
says what would work. They read shapes only, so they hold on meta and need no process group.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from titanplans.errors import PlanError, either, near_multiples
from titanplans.tensor_parallel.decoder import Decoder, join
from titanplans.tensor_parallel.plan import KV_HEADS, Plan, TPOptions, TPPlan
from titanplans.tensor_parallel.stream import shard_size
from titanplans.tensor_parallel.styles import Colwise, KVColwise, Rowwise, Style

_DEGREES = 256
"""How far degrees that would work are sought."""


class Size(NamedTuple):
    """Something that the degree has to suit."""

    what: str
    value: int
    where: str
    suits: Callable[[int], bool]
    """Whether a degree would do."""
    fault: str = "does not divide"
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
                    f"no key of {plan_name}: add '{name}' with a style. What is not split is "
                    "replicated_in_region() inside a region, replicated_on_stream() outside"
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


def check_mixers(plan: Mapping[str, ParallelStyle], decoder: Decoder, options: TPOptions) -> None:
    """Refuse to let a token mixer see its rank's shard of the sequence only."""
    if not options.sequence_parallel:
        return
    ours = _ours(plan)
    for name, mixer in decoder.mixers.items():
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
    """Refuse a degree that does not suit every size, with the degrees that do."""
    for size in sizes:
        if not size.suits(options.degree):
            largest = max(s.value for s in sizes)
            works = [d for d in range(1, min(largest, _DEGREES) + 1) if all(s.suits(d) for s in sizes)]
            raise PlanError(
                f"tensor_parallel_degree = {options.degree} {size.fault} {size.what} = {size.value} ({size.where}): "
                f"{either(works)} would work{size.also}"
            )


def sizes(plan: Plan, source: TPPlan, model: nn.Module, decoder: Decoder) -> Iterator[Size]:
    """Yield what the degree has to suit: heads first, since they say most, then every sharded dimension.

    Inside a token mixer shards are whole heads, so the degree must divide. Elsewhere they may be
    uneven, as long as every rank holds something.
    """
    ours = _ours(plan)
    for name, mixer in decoder.mixers.items():
        inside = [style for key, style in ours.items() if _within(key, name)]
        if any(isinstance(style, Colwise) for style in inside):
            shared = any(isinstance(style, KVColwise) for style in inside)
            yield from _heads(source.plan_of(mixer), mixer, f"{name}, {type(mixer).__name__}", shared)
    for key, style in ours.items():
        module = model.get_submodule(key)
        in_mixer = decoder.mixer_around(key) is not None
        for name, layout in style.layouts(module).items():
            if isinstance(layout.placement, Shard):
                param = module._parameters[name]
                assert param is not None
                what, value = f"dimension {layout.placement.dim} of {name}", param.shape[layout.placement.dim]
                where = f"{key}, {type(module).__name__}"
                if in_mixer:
                    yield Size(what, value, where, partial(_divides, value))
                else:
                    also = f", or a size of {_next_multiple(value, source.options.degree)}"
                    yield Size(
                        what, value, where, partial(_fills, value), "leaves a rank without a share of", also
                    )


def _heads(plan: TPPlan, mixer: nn.Module, where: str, shared: bool) -> Iterator[Size]:
    degree = plan.options.degree
    for name, count in plan.heads(mixer).items():
        if name in KV_HEADS and shared:
            also = f", or {name} = {either([n for n in range(1, degree + 1) if degree % n == 0])}"
            yield Size(name, count, where, partial(_divides_either_way, count), also=also)
        else:
            also = f", or {name} = {near_multiples(count, degree)}"
            if name in KV_HEADS:
                also += ", or kv_colwise() where colwise() splits keys and values"
            yield Size(name, count, where, partial(_divides, count), also=also)


def _divides(value: int, degree: int) -> bool:
    return value % degree == 0


def _divides_either_way(value: int, degree: int) -> bool:
    return value % degree == 0 or degree % value == 0


def _fills(value: int, degree: int) -> bool:
    """Whether every rank would hold something of `value`."""
    return shard_size(value, shard_size(value, degree)) == degree


def _next_multiple(value: int, factor: int) -> int:
    return shard_size(value, factor) * factor
