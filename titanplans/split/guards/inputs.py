"""What a forward of a split model may be asked, and where its stream begins and ends.

A split model looks like the whole one from outside, but its body sees shards: of the sequence between the regions, of the
heads inside of them, of the vocabulary at the head. So what comes in before the stream begins, and what goes out after it
has ended, is whole. The stream ends where the logits are made, or before: at the exit of the module that holds the blocks,
if that was called by itself, or if hidden states were asked for, or the logits of some tokens only. Where the model's code
would still draw a conclusion from a shard, the call is refused.
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial, wraps
from typing import Any

import torch
from torch import nn

from titanplans.errors import PlanError
from titanplans.split.stages.stage import PassedModule
from titanplans.split.state import specialise, subclass
from titanplans.split.stream import Border
from titanplans.text import class_name

_HIDDEN_STATES = ("last_hidden_state", "hidden_states")
_KEPT = ("logits_to_keep", "num_logits_to_keep")


@dataclass
class Forwards:
    """The facts of a split model that the guards of its forwards need."""

    border: Border
    """That of its residual stream."""
    own_loss: bool
    """The model can compute its own loss: logits are whole, and nothing but the head reads the head's weight."""
    has_head: bool
    """Logits are made behind the blocks: the stream lasts until then."""
    ends_early: bool
    """The stream can be ended before the head: that is behind the module that holds the blocks, and in our style."""
    begins_at_embedding: bool
    """The embedding lays its output out as the stream; what bypasses it has to be laid out, too."""


def guard_forwards(model: nn.Module, base: nn.Module, begins_at: nn.Module | None, known: Forwards) -> None:
    """Put hooks around the forwards of `model` and of `base`, and before the block at which the stream begins.

    Args:
        model: the split model.
        base: the module in it that holds the blocks, or `model` itself.
        begins_at: the first block, if each rank takes its shard of the sequence at its entry: everything before it sees the
            whole sequence, so what a model derives from its embeddings (positions, masks, the places of images) is right.
            None if the stream begins at the embedding, or is not sharded.
        known: what else there is to know.
    """
    if begins_at is not None:
        begins_at.register_forward_pre_hook(partial(_begin, known.border), with_kwargs=True)
    known.border.stream.stop()
    if not known.has_head:
        specialise(model, _without_head(type(model)))
    for module in (model,) if base is model else (model, base):
        before = partial(_before, known, module is model, module is base, positional(module))
        after = partial(_after, known, module is model, module is base)
        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(after, always_call=True)


@cache
def _without_head(cls: type[nn.Module]) -> type[nn.Module]:
    """Subclass `cls`, whose forward may multiply with the weight of its embedding, whose rows are shared out."""

    @wraps(cls.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return cls.forward(self, *args, **kwargs)
        except RuntimeError as error:
            if "mixed torch.Tensor and DTensor" not in str(error):
                raise
            raise PlanError(
                f"the forward of {class_name(self)} computes with a weight outside of its module, and has no head: where it "
                "makes logits with the embedding's weight, give it lm_head = nn.Linear(width, vocabulary, bias=False) with "
                "lm_head.weight = embedding.weight, and call that"
            ) from error

    return subclass(cls, {"forward": forward}, "without_head")


def positional(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the arguments that the forward of `module` takes by position, in order."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(module.forward).parameters.values()
    return tuple(parameter.name for parameter in parameters if parameter.kind in kinds)


def _begin(border: Border, block: nn.Module, args, kwargs):
    stream = border.stream
    if stream.begun and not stream.ended:
        raise PlanError(
            f"{class_name(block)}, the first block, was called twice in a forward, and takes its shard of the sequence "
            "each time: set sequence_parallel = False"
        )
    stream.begun = True
    if args:
        return (border.begin(args[0]), *args[1:]), kwargs
    name = next((name for name in ("hidden_states", "x") if name in kwargs), None)
    if name is None:
        raise PlanError(
            f"{class_name(block)}, the first block, was called without a positional input and without 'hidden_states' "
            f"(got {', '.join(kwargs) or 'nothing'}): set sequence_parallel = False"
        )
    return args, {**kwargs, name: border.begin(kwargs[name])}


def begin_at_output(module: PassedModule, border: Border) -> None:
    """Lay out the output of a pipeline stage's stand-in for the embedding as the stream; what is received lies so."""

    def begin(_module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        if not border.stream.is_sharded():
            return output
        border.stream.begun = True
        laid_out = border.begin(module.stand_in(args[0]))
        return output if module.is_received else laid_out

    module.register_forward_hook(begin)


def end_at_output(module: nn.Module, border: Border) -> None:
    """Let `module`, a stand-in for the module at which the stream ends, return zeros of the whole sequence."""

    def end(_module: nn.Module, _args: Any, output: torch.Tensor) -> torch.Tensor:
        if not border.stream.is_sharded():
            return output
        border.stream.stop()
        shape = list(output.shape)
        shape[border.tokens.dim] = border.stream.length
        return output.new_zeros(shape)

    module.register_forward_hook(end)


def _before(
    known: Forwards, is_model: bool, is_base: bool, names: tuple[str, ...], module: nn.Module, args, kwargs
):
    given = dict(zip(names, args, strict=False)) | kwargs
    stream = known.border.stream
    _refuse(known, is_model, module, given)
    if not stream.is_cut:
        return None
    if is_model or stream.ended:  # otherwise the model was called, and calls its base
        kept = any(_is_some(given.get(name)) for name in _KEPT)
        stream.start(head_follows=is_model and known.has_head and not kept)
    if is_base and known.begins_at_embedding and given.get("inputs_embeds") is not None:
        if stream.begun:
            raise PlanError(
                f"{class_name(module)} was called with inputs_embeds that the model has made in the same forward, from "
                "this rank's shard of an embedding that begins the stream: let its plan say vocab_embedding() without "
                "begins_stream, or make them before the model is called"
            )
        embedded = known.border.begin(given["inputs_embeds"])
        place = names.index("inputs_embeds")
        if place < len(args):
            return (*args[:place], embedded, *args[place + 1 :]), kwargs
        return args, {**kwargs, "inputs_embeds": embedded}
    return None


def _refuse(known: Forwards, is_model: bool, module: nn.Module, given: Mapping[str, Any]) -> None:
    """Refuse arguments, `given` by name, that the code of `module` would handle wrongly."""
    name = class_name(module)
    if is_model and known.border.tokens.ranks > 1 and given.get("labels") is not None:
        raise PlanError(
            f"{name} was called with labels, but with context parallelism a rank has the logits of its own tokens "
            "alone, where the model's own loss is wrong: leave labels out, and give them with its logits to "
            "titanplans.parallel.cross_entropy"
        )
    if is_model and not known.own_loss and given.get("labels") is not None:
        raise PlanError(
            f"{name} was called with labels, but its logits or its head are sharded over the vocabulary, "
            "where its own loss is wrong: compute the loss from the logits, or set loss_parallel = False "
            "and fuse_linear_cross_entropy = False (fuse_cross_entropy, where a config has no other)"
        )
    for kept in _KEPT:
        if known.border.stream.is_cut and not known.ends_early and _is_some(given.get(kept)):
            raise PlanError(
                f"{name} was called with {kept} = {given[kept]}, which would keep that many tokens of each "
                "rank's shard: take the last logits from the output, or set sequence_parallel = False"
            )
    attentions = given.get("output_attentions")
    if attentions is None:
        attentions = getattr(getattr(module, "config", None), "output_attentions", False)
    if attentions and known.border.group[1] * known.border.stream.parts > 1:
        raise PlanError(
            f"{name} was called with output_attentions = {attentions}, but each rank has the attention of its own heads "
            "only: leave it out, or call the model before it is split"
        )


def _is_some(kept: Any) -> bool:
    """Whether `logits_to_keep` leaves tokens out: 0 and None are all of them."""
    return kept is not None and not (isinstance(kept, int) and kept == 0)


def _after(known: Forwards, is_model: bool, is_base: bool, module: nn.Module, args, output):
    stream = known.border.stream
    if not stream.is_cut:
        return None
    if output is None:  # the forward has failed
        stream.stop()
        return None
    if isinstance(output, torch.Tensor | tuple):
        fields: Any = {}  # a compiler has no `__dict__` of a tensor
    else:
        fields = output if isinstance(output, dict) else getattr(output, "__dict__", {})
    asked = fields.get("hidden_states") is not None
    if not is_model and stream.head_follows and not asked and not isinstance(output, tuple):
        return None  # the head takes its shard
    stream.stop()
    seen: dict[int, torch.Tensor] = {}
    if isinstance(output, torch.Tensor | tuple):
        return output if known.has_head and is_model else _whole(known.border, output, seen)
    for name in _HIDDEN_STATES:
        if (states := fields.get(name)) is not None:
            fields[name] = _whole(known.border, states, seen)
    return None


def _whole(border: Border, states: Any, seen: dict[int, torch.Tensor]) -> Any:
    """Return `states`, a tensor or a tuple of them, with each shard made whole; equal tensors stay one."""
    if isinstance(states, tuple | list):
        made = [_whole(border, each, seen) for each in states]
        kind: Any = type(states)
        return kind(made) if kind in (tuple, list) else kind(*made)  # a named tuple
    if not isinstance(states, torch.Tensor) or not border.holds_shard(states):
        return states
    if id(states) not in seen:
        seen[id(states)] = border.end(states)
    return seen[id(states)]
