"""Refuse arguments of a forward that the code of a split model would handle wrongly: `guard_forwards`.

This code sees shards of the sequence between regions, of the heads inside regions, and of the vocabulary at the head.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial, wraps
from typing import Any

from torch import nn

from titanplans.errors import PlanError
from titanplans.split.arguments import positional
from titanplans.split.border import Border
from titanplans.split.state import specialise, subclass
from titanplans.split.stream import keeps_some_logits
from titanplans.text import class_name


@dataclass
class ForwardFacts:
    """The facts about a split model that its guards need."""

    border: Border
    can_compute_loss: bool
    """The model can compute its own loss: its logits are full, and only the head uses the head's weight."""
    has_head: bool
    """The model computes logits after the blocks."""
    can_end_before_head: bool
    """The stream can end after the module that holds the blocks, before a head with `vocab_head()`."""


def guard_forwards(model: nn.Module, base: nn.Module, facts: ForwardFacts) -> None:
    """Refuse wrong calls of `model`, and of `base`, the module in it that holds the blocks."""
    if not facts.has_head:
        specialise(model, _without_head(type(model)))
    for module in (model,) if base is model else (model, base):
        refuse = partial(_refuse_arguments, facts, module is model, positional(module))
        module.register_forward_pre_hook(refuse, with_kwargs=True)


@cache
def _without_head(cls: type[nn.Module]) -> type[nn.Module]:
    """Subclass `cls` to explain torch's error if its forward computes logits with the embedding's sharded weight."""

    @wraps(cls.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return cls.forward(self, *args, **kwargs)
        except RuntimeError as error:
            if "mixed torch.Tensor and DTensor" not in str(error):
                raise
            raise PlanError(
                f"the forward of {class_name(self)} uses a weight outside of its module, and the model has no head: if "
                "it makes logits with the embedding's weight, give it lm_head = nn.Linear(width, vocabulary, "
                "bias=False) with lm_head.weight = embedding.weight, and call lm_head"
            ) from error

    return subclass(cls, {"forward": forward}, "without_head")


def _refuse_arguments(
    facts: ForwardFacts, is_model: bool, names: tuple[str, ...], module: nn.Module, args: Any, kwargs: Any
) -> None:
    arguments: Mapping[str, Any] = dict(zip(names, args, strict=False)) | kwargs
    border, name = facts.border, class_name(module)
    if is_model and border.tokens.ranks > 1 and arguments.get("labels") is not None:
        raise PlanError(
            f"{name} was called with labels, but with context parallelism a rank has the logits of only its local tokens, "
            "so the model's own loss would be wrong: leave labels out, and pass them with its logits to "
            "titanplans.parallel.cross_entropy"
        )
    if is_model and not facts.can_compute_loss and arguments.get("labels") is not None:
        raise PlanError(
            f"{name} was called with labels, but its logits or its head are sharded over the vocabulary, "
            "so its own loss would be wrong: compute the loss from the logits, or set loss_parallel = False "
            "and fuse_linear_cross_entropy = False (or fuse_cross_entropy = False, if the config has only that)"
        )
    keeps = keeps_some_logits(arguments)
    if border.stream.shards_sequence and not facts.can_end_before_head and keeps is not None:
        raise PlanError(
            f"{name} was called with {keeps} = {arguments[keeps]}, which would keep that many tokens of each "
            "rank's shard: take the last logits from the output, or set sequence_parallel = False"
        )
    attentions = arguments.get("output_attentions")
    if attentions is None:
        attentions = getattr(getattr(module, "config", None), "output_attentions", False)
    if attentions and border.group[1] * border.tokens.ranks > 1:
        raise PlanError(
            f"{name} was called with output_attentions = {attentions}, but each rank has the attention of only its heads: "
            "leave it out, or call the model before it is split"
        )
