"""Find faults of a plan in regions, mixers and the stream's ends, which would make sums over ranks wrong or missing."""

import inspect
from collections.abc import Iterator

from torch import nn

from titanplans.errors import PlanError, either
from titanplans.plan.resolve import ResolvedPlan
from titanplans.split.adapted import dropout_refusal
from titanplans.split.cache import CACHES
from titanplans.split.converted import float8_linears
from titanplans.split.decoder import HEADS, find_decoder, within
from titanplans.styles.base import Style

Fault = tuple[str, str]
"""A plan key, and what is wrong there."""


def region_faults(plan: ResolvedPlan) -> Iterator[Fault]:
    """Yield the faults of styles, regions, mixers and the stream's ends that would make sums over ranks wrong or missing."""
    yield from _parameter_faults(plan)
    yield from _sum_faults(plan)
    yield from _mixer_faults(plan)
    yield from _end_faults(plan)
    yield from _module_faults(plan)
    if plan.source.options.degrees.cp > 1:
        yield from _token_faults(plan)


def _parameter_faults(plan: ResolvedPlan) -> Iterator[Fault]:
    """Yield each style that is wrong for the parameter that its key names."""
    for entry in plan.entries:
        if entry.parameter is not None:
            reason = entry.style.parameter_refusal(entry.parameter, getattr(entry.module, entry.parameter))
            if reason is not None:
                yield entry.key, reason


def _module_faults(plan: ResolvedPlan) -> Iterator[Fault]:
    """Yield each style that is wrong on its module."""
    for entry in plan.entries:
        reason = entry.style.refusal(entry.module, plan.over) if entry.parameter is None else None
        if reason := reason or dropout_refusal(entry.module, entry.layouts):
            yield entry.key, reason


def _sum_faults(plan: ResolvedPlan) -> Iterator[Fault]:
    """Yield split modules outside of regions, and regions whose output would not be one sum over the ranks."""
    ours = {entry.key: entry.style for entry in plan.entries}
    opened = {key: style for key, style in ours.items() if style.opens}
    for entry in plan.entries:
        key, style = entry.key, entry.style
        # A parameter of the model itself, such as a bound for each layer's gates, may be used inside the blocks' regions.
        for_blocks = entry.parameter is not None and any(within(region, entry.path) for region in opened)
        if style.is_inside_region and not for_blocks and not any(within(key, region) for region in opened):
            yield (
                key,
                "it is in no region, so its input is not gathered to the full sequence, and its input's gradient is not "
                "summed: add **self.attn_input() or **self.mlp_input() to its plan",
            )
    for region, opener in opened.items():
        inside = {key: style for key, style in ours.items() if within(key, region)}
        closers = [key for key, style in inside.items() if style.closes]
        # Foreign styles may split and sum, but do not declare it.
        all_ours = not any(within(key, region) for key in plan.styles.keys() - ours.keys())
        sums = any(style.makes_partial_sum or style.splits_by_experts for style in inside.values())
        if all_ours and not opener.shared and not sums:
            yield (
                region,
                "it opens a region without a rowwise() projection, so every rank would compute the same output and "
                "their sum would be too large: split it, remove the region, or use shared_region() if only regions "
                "use its output",
            )
        if all_ours and not opener.shared and not closers and not opener.closes:
            yield (
                region,
                "it opens a region whose partial output is never summed: give its last projection rowwise(), or use "
                "attn_region() or mlp_region()",
            )
        if closers and opener.closes:
            yield (
                region,
                f"it sums the output of a region that '{closers[0]}' sums, too, which would count it once per rank: give "
                "the projection rowwise(reduce_output=False), or use attn_input() / mlp_input()",
            )


def _mixer_faults(plan: ResolvedPlan) -> Iterator[Fault]:
    """Yield token mixers that would see only a shard of the sequence, and split mixers whose head count is unknown."""
    ours, source = {entry.key: entry.style for entry in plan.entries}, plan.source
    for name, mixer in plan.decoder.mixers.items():
        keys = [key for key in plan.styles if key == name or within(key, name)]
        gathered = any(
            style.enters_full and (key == name or within(name, key)) for key, style in ours.items()
        )
        if source.options.sequence_parallel and keys and ours.keys() >= set(keys) and not gathered:
            yield (
                keys[0],
                f"the mixer {name} ({type(mixer).__name__}) is in no region, so with sequence parallelism it would mix "
                "only its rank's shard of the sequence: split it in attn_input() or attn_region(), or set "
                "sequence_parallel = False",
            )
        key, owner = plan.split_key(name), source.plan_of(mixer)
        if key is not None and all(count in owner.shared_head_names for count in owner.heads(mixer)):
            yield (
                key,
                f"it splits the mixer {name} ({type(mixer).__name__}), whose head count is unknown, since neither the "
                f"module nor its config has {' or '.join(owner.head_names)}: give it this attribute, or set "
                f"head_names in {type(owner).__name__} to the attribute that counts the split heads; local_attributes "
                "then sets each rank's count in its code",
            )


def _end_faults(plan: ResolvedPlan) -> Iterator[Fault]:
    """Yield an embedding whose style does not say where the stream begins, and styles on the stream after its end."""
    decoder = plan.decoder
    head = decoder.head
    if (
        head is not None
        and plan.source.options.shards_tokens
        and head in plan.by_key
        and plan.by_key[head].style.is_on_stream
    ):
        yield (
            head,
            "it makes the logits, and each rank would have only the logits of its tokens: give it vocab_head()",
        )
    if not plan.source.options.sequence_parallel:
        return
    if any(entry.style.opens for entry in plan.entries):
        key = decoder.embedding
        if key is not None and not isinstance(plan.styles[key], Style):
            yield (
                key,
                "with sequence parallelism an embedding has to declare whether its output is the full sequence or a shard, "
                "as only styles of titanplans do: give it vocab_embedding(), or set sequence_parallel = False",
            )
    if decoder.head is None and decoder.blocks:
        for entry in plan.entries:
            on_base = entry.key == decoder.base or within(entry.key, decoder.base)
            if entry.style.is_on_stream and not on_base:
                yield (
                    entry.key,
                    f"it is after the blocks of a model without a head (vocab_head(), or named {either(HEADS)}), where "
                    "every rank has the full sequence and so the full gradient: give it replicated_off_stream()",
                )


def _token_faults(plan: ResolvedPlan) -> Iterator[Fault]:
    """Yield styles that context parallelism can't use, because they do not declare how a mixer is split by heads.

    Raises:
        PlanError: the model has no blocks, or has modules in float8.
    """
    options = plan.source.options
    if linears := float8_linears(plan.model):
        raise PlanError(
            f"context_parallel_degree = {options.degrees.cp}: {next(iter(linears))} is float8, whose scales cover "
            "all tokens, and a rank has only some: remove float8, or set context_parallel_degree = 1"
        )
    find_decoder(plan.model)  # raises if there are no blocks
    for entry in plan.entries:
        is_mlp = entry.style.opens and not entry.style.mixes_tokens
        if is_mlp and (argument := _token_argument(entry.module)):
            yield (
                entry.key,
                f"its forward takes {argument}, as code that mixes tokens does, but it is planned as an MLP, which gets "
                "only this rank's tokens under context parallelism: give it attn_region() or attn_input()",
            )
    for key, style in plan.styles.items():
        in_mixer = any(within(key, region) for region in plan.token_regions)
        if not isinstance(style, Style) and (options.has_all_weights or in_mixer):
            yield (
                key,
                "context parallelism splits a module as its style declares, but this style installs its own hooks: "
                "give the module a style of titanplans, such as colwise()",
            )


def _token_argument(module: nn.Module) -> str | None:
    """Return the first argument of the forward of `module` that code takes only if it mixes tokens, or None."""
    parameters = inspect.signature(module.forward).parameters
    return next(
        (name for name in ("attention_mask", "cu_seqlens", "state", *CACHES) if name in parameters), None
    )
