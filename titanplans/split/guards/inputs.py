"""Arguments of a forward that the code of a split model would handle wrongly; they are refused.

A split model looks like the unsplit one from outside, but its body sees shards: of the sequence between the regions, of the
heads inside of them, of the vocabulary at the head. Where its code would conclude from a shard, the call is refused.
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
class Forwards:
    """The facts of a split model that the guards of its forwards need."""

    border: Border
    own_loss: bool
    """The model can compute its own loss: its logits are full, and nothing but the head uses the head's weight."""
    has_head: bool
    """Logits are made after the blocks."""
    ends_early: bool
    """The stream can end before the head: after the module that holds the blocks, and before a head of our own style."""


def guard_forwards(model: nn.Module, base: nn.Module, forwards: Forwards) -> None:
    """Refuse calls of `model`, and of `base`, the module in it that holds the blocks, that would be wrong."""
    if not forwards.has_head:
        specialise(model, _without_head(type(model)))
    for module in (model,) if base is model else (model, base):
        refuse = partial(_refuse_arguments, forwards, module is model, positional(module))
        module.register_forward_pre_hook(refuse, with_kwargs=True)


@cache
def _without_head(cls: type[nn.Module]) -> type[nn.Module]:
    """Subclass `cls`, whose forward may multiply with the weight of its embedding, whose rows are sharded."""

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


def _refuse_arguments(
    forwards: Forwards, is_model: bool, names: tuple[str, ...], module: nn.Module, args: Any, kwargs: Any
) -> None:
    arguments: Mapping[str, Any] = dict(zip(names, args, strict=False)) | kwargs
    border, name = forwards.border, class_name(module)
    if is_model and border.tokens.ranks > 1 and arguments.get("labels") is not None:
        raise PlanError(
            f"{name} was called with labels, but with context parallelism a rank has the logits of its own tokens "
            "alone, where the model's own loss is wrong: leave labels out, and give them with its logits to "
            "titanplans.parallel.cross_entropy"
        )
    if is_model and not forwards.own_loss and arguments.get("labels") is not None:
        raise PlanError(
            f"{name} was called with labels, but its logits or its head are sharded over the vocabulary, "
            "where its own loss is wrong: compute the loss from the logits, or set loss_parallel = False "
            "and fuse_linear_cross_entropy = False (fuse_cross_entropy, where a config has no other)"
        )
    if border.stream.shards_sequence and not forwards.ends_early and (kept := keeps_some_logits(arguments)):
        raise PlanError(
            f"{name} was called with {kept} = {arguments[kept]}, which would keep that many tokens of each "
            "rank's shard: take the last logits from the output, or set sequence_parallel = False"
        )
    attentions = arguments.get("output_attentions")
    if attentions is None:
        attentions = getattr(getattr(module, "config", None), "output_attentions", False)
    if attentions and border.group[1] * border.tokens.ranks > 1:
        raise PlanError(
            f"{name} was called with output_attentions = {attentions}, but each rank has the attention of its own heads "
            "only: leave it out, or call the model before it is split"
        )
