"""`check`: what strict application refuses before anything moves, the plan against the model.

Each check reads names and shapes only, so it holds on meta and needs no process group. Most yield faults: a plan key and
what is wrong there, with what would work; `_refuse` makes an error of the first one and adds style, module and class.
What the degree has to suit is in `sizes`, float8 in `float8_checks`.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from titanplans.errors import PlanError, either
from titanplans.tensor_parallel import nf4
from titanplans.tensor_parallel.coverage import check_adapters, check_coverage, check_keys
from titanplans.tensor_parallel.decoder import HEADS, Decoder, find_decoder, within
from titanplans.tensor_parallel.dropout import check_dropout
from titanplans.tensor_parallel.float8 import Crossing
from titanplans.tensor_parallel.float8_checks import check_float8, check_torchao_styles, float8_crossings
from titanplans.tensor_parallel.local_code import Functions, code_of_ranks
from titanplans.tensor_parallel.low_rank import dropout_refusal
from titanplans.tensor_parallel.packed_checks import packed_faults
from titanplans.tensor_parallel.plan import Plan, TPPlan
from titanplans.tensor_parallel.projections import Rowwise
from titanplans.tensor_parallel.replicated import ReplicatedOnStream
from titanplans.tensor_parallel.sizes import check_degree
from titanplans.tensor_parallel.styles import (
    Region,
    Style,
    layouts_at,
    own_styles,
    split_key,
    target,
    targets,
)
from titanplans.tensor_parallel.vocab import VocabEmbedding
from titanplans.user_code import as_user_error

Fault = tuple[str, str]
"""A plan key, and what is wrong there."""


@dataclass(frozen=True)
class Checked:
    """A plan that fits its model, and all that its application needs to know of both."""

    styles: Plan
    """By fully qualified module name."""
    decoder: Decoder
    crossings: dict[str, Crossing]
    """How a sequence crosses the border of a region or of the head in float8, by plan key."""
    tied: list[list[str]]
    """The names of parameters that are one tensor, group by group."""
    begins_at: nn.Module | None
    """The block at whose entry the stream is sharded; None: at the embedding, or not at all."""
    attributes: dict[str, dict[str, Any]]
    """What the code of a split mixer or MLP counts on each rank, by the module's name."""
    functions: dict[str, Functions]
    """Which functions the code of a split mixer, and of the model, calls, by the module's name."""


def check(
    source: TPPlan, model: nn.Module, backend: str | None = None, dtype: torch.dtype | None = None
) -> Checked:
    """Check the plan `source` against `model`, which is left as it is.

    Args:
        source: the plan, with its options.
        model: not yet split.
        backend: that of the TP group; None if there is no group yet.
        dtype: of the weights in products; None: their own.

    Raises:
        PlanError: see `apply.check_plan`.
    """
    name = type(source).__name__
    with as_user_error(f"plan {name}"):
        styles = source.full_plan(model)
    check_adapters(model)
    check_keys(styles, model, source)
    check_coverage(styles, model, name)
    _refuse(parameter_refusals(styles, model), styles, model)
    _refuse(region_faults(styles, model), styles, model)
    decoder = with_unnamed_mixers(find_decoder(model, required=False), styles, source)
    _refuse(mixer_faults(styles, decoder, source), styles, model)
    _refuse(end_faults(styles, decoder, source), styles, model)
    _refuse(refusals(styles, model, source.options.degree), styles, model)
    _refuse(packed_faults(styles, model, decoder, source), styles, model)
    check_tied(styles, model)
    check_dropout(model, source.options.degree)
    check_degree(styles, source, model, decoder, dtype)
    check_float8(styles, model, source.options.degree)
    check_torchao_styles(styles, model, backend)
    begins_at = None
    if source.options.sequence_parallel and not embedding_begins_stream(styles, decoder):
        begins_at = (decoder if decoder.blocks else find_decoder(model)).blocks[0].module
    attributes, functions = code_of_ranks(styles, model, decoder, source)
    crossings = float8_crossings(styles, model)
    return Checked(styles, decoder, crossings, tied_parameters(model), begins_at, attributes, functions)


def _refuse(faults: Iterable[Fault], plan: Plan, model: nn.Module) -> None:
    """Raise a PlanError of the first of `faults`, if there is one."""
    for key, reason in faults:
        raise PlanError(reason, key=key, style=plan[key], module=target(key, model).module)


def parameter_refusals(plan: Plan, model: nn.Module) -> Iterator[Fault]:
    """Yield each style that would be wrong for the parameter that its key names."""
    for key, style, found in targets(plan, model):
        if found.parameter is not None:
            param = found.module._parameters[found.parameter]
            reason = style.parameter_refusal(found.parameter, param)  # type: ignore[arg-type]
            if reason is not None:
                yield key, reason


def refusals(plan: Plan, model: nn.Module, degree: int) -> Iterator[Fault]:
    """Yield each style that would be wrong on its module."""
    for key, style, found in targets(plan, model):
        reason = style.refusal(found.module) if found.parameter is None else None
        layouts = layouts_at(found, style, plan)
        reason = (
            reason or dropout_refusal(found.module, layouts) or nf4.refusal(found.module, layouts, degree)
        )
        if reason is not None:
            yield key, reason


def region_faults(plan: Plan, model: nn.Module) -> Iterator[Fault]:
    """Yield split modules outside a region, and regions whose output would not be one sum of parts."""
    ours = own_styles(plan)
    opened = {key: style for key, style in ours.items() if style.opens}
    for key, style, found in targets(plan, model):
        # A parameter that the model holds for its blocks, such as a bound for each layer's gates, is read inside of them.
        for_blocks = found.parameter is not None and any(within(region, found.path) for region in opened)
        if style.inside and not for_blocks and not any(within(key, region) for region in opened):
            yield (
                key,
                "it stands in no region, so its input is not the whole sequence and its input's gradient is not summed: "
                "add **self.attn_input() or **self.mlp_input() to its plan",
            )
    for region, opener in opened.items():
        inside = {key: style for key, style in ours.items() if within(key, region)}
        closers = [key for key, style in inside.items() if style.closes]
        # Foreign styles may do the splitting and the summing; they don't say.
        all_ours = not any(within(key, region) for key in plan.keys() - ours.keys())
        shared = isinstance(opener, Region) and opener.shared
        if all_ours and not shared and not any(isinstance(style, Rowwise) for style in inside.values()):
            yield (
                region,
                "it opens a region without a rowwise() projection: every rank would compute the same output, and their "
                "sum is that many times too large: split it, or drop the region; shared_region() if regions read its output",
            )
        if all_ours and not shared and not closers and not opener.closes:
            yield (
                region,
                "it opens a region that nothing leaves, so its partial output is not summed: give its last projection "
                "rowwise(), or use attn_region() or mlp_region()",
            )
        if closers and opener.closes:
            yield (
                region,
                f"it sums the output of a region that '{closers[0]}' sums too, which would count it once per rank: give "
                "the projection rowwise(reduce_output=False), or use attn_input() / mlp_input()",
            )


def mixer_faults(plan: Plan, decoder: Decoder, source: TPPlan) -> Iterator[Fault]:
    """Yield token mixers that would see a shard of the sequence only, and split ones whose heads are not known."""
    ours = own_styles(plan)
    for name, mixer in decoder.mixers.items():
        keys = [key for key in plan if key == name or within(key, name)]
        gathered = any(style.gathers and (key == name or within(name, key)) for key, style in ours.items())
        if source.options.sequence_parallel and keys and ours.keys() >= set(keys) and not gathered:
            yield (
                keys[0],
                f"the mixer {name} ({type(mixer).__name__}) stands in no region, so with sequence parallelism it would mix "
                "its rank's shard of the sequence only: split it in attn_input() or attn_region(), or set "
                "sequence_parallel = False",
            )
        key, owner = split_key(plan, name), source.plan_of(mixer)
        if key is not None and all(count in owner.shared_head_names for count in owner.heads(mixer)):
            yield (
                key,
                f"it splits the mixer {name} ({type(mixer).__name__}), whose number of heads is not known: neither the "
                f"module nor its config has {' or '.join(owner.head_names)}: give it this attribute, or set head_names in "
                f"{type(owner).__name__} to the attribute that counts what is split",
            )


def end_faults(plan: Plan, decoder: Decoder, source: TPPlan) -> Iterator[Fault]:
    """Yield an embedding of which nothing says where the stream begins, and what stays on it where it has ended."""
    if source.options.sequence_parallel and any(style.opens for style in own_styles(plan).values()):
        key = decoder.embedding
        if key is not None and not isinstance(plan[key], Style):
            yield (
                key,
                "with sequence parallelism it has to be known whether an embedding's output is whole or a shard, which only "
                "styles of titanplans say: give it vocab_embedding(), or set sequence_parallel = False",
            )
    if source.options.sequence_parallel and decoder.head is None and decoder.blocks:
        for key, style in own_styles(plan).items():
            if (
                isinstance(style, ReplicatedOnStream)
                and key != decoder.base
                and not within(key, decoder.base)
            ):
                yield (
                    key,
                    f"it stands behind the blocks of a model without a head ({either(HEADS)}), where every rank has the "
                    "whole sequence and so the whole gradient: give it replicated_off_stream()",
                )


def with_unnamed_mixers(decoder: Decoder, plan: Plan, source: TPPlan) -> Decoder:
    """Return `decoder` with the mixers that have none of the usual names.

    In a block without a module of such a name, the first region beside the MLP is taken for the mixer, one whose number
    of heads is known before others.
    """
    regions = [key for key, style in own_styles(plan).items() if style.opens]
    blocks = []
    for block in decoder.blocks:
        found = [r for r in regions if r != block.mlp and (r == block.name or within(r, block.name))]
        if block.mixer is None and found:
            found.sort(key=lambda region: not source.heads(block.child(region)))  # stable
            block = replace(block, mixer=found[0])
        blocks.append(block)
    return replace(decoder, blocks=tuple(blocks))


def embedding_begins_stream(plan: Plan, decoder: Decoder) -> bool:
    """Whether the embedding's output is laid out as the stream; a foreign style is taken to do it."""
    ours = [style.begins_stream for style in plan.values() if isinstance(style, VocabEmbedding)]
    if ours:
        return any(ours)
    return decoder.embedding is not None and not isinstance(plan[decoder.embedding], Style)


def check_tied(plan: Plan, model: nn.Module) -> None:
    """Refuse to lay one tensor out in two ways."""
    for names in tied_parameters(model):
        layouts = {}
        for name in names:
            key, _, param_name = name.rpartition(".")
            key = name if name in plan else key
            if key not in plan:
                raise PlanError(
                    f"{' and '.join(names)} are one tensor, and the plan has no style for {key}: give it one; if both names "
                    "are of one module, let the model hold it once, and its forward call it again"
                )
            if isinstance(style := plan[key], Style):
                layouts[name] = layouts_at(target(key, model), style, plan)[param_name].placement
        if len(set(layouts.values())) > 1:
            raise PlanError(
                f"{' and '.join(f'{name} ({placement!r})' for name, placement in layouts.items())} are tied, so one "
                "tensor: give both keys styles of the same placement, or untie them in the model's config"
            )


def tied_parameters(model: nn.Module) -> list[list[str]]:
    """Return the names of parameters that are one tensor, group by group."""
    groups: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(param), []).append(name)
    return [names for names in groups.values() if len(names) > 1]
