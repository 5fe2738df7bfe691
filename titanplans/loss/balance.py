"""`added_loss`: the load-balancing loss of a model's routers. For routers' biases see `titanplans.split.experts.loads`."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from titanplans.errors import ModelError, either
from titanplans.split.collectives import Group, gather
from titanplans.split.stages.trace import LOSS_FIELDS
from titanplans.split.state import border_of_model
from titanplans.text import class_name

_WEIGHTS = ("router_aux_loss_coef", "aux_loss_scale")
"""Config fields that hold the weight of the load-balancing loss."""
_EXPERTS = ("num_experts", "num_local_experts", "num_memories")
_EXPERTS_A_TOKEN = ("num_experts_per_tok", "topk")


def added_loss(model: nn.Module, output: Any, data: Group | None = None) -> torch.Tensor | None:
    """Return the weighted load-balancing loss to add to the mean cross entropy of a batch: a scalar, or None.

    A model returns this loss as `aux_loss`, and its config has the weight. Some models return only their routers' logits,
    because they compute the loss only together with their own cross entropy. For these models the loss is computed here,
    with `load_balancing_loss_func` of the model's file. With `data` the loss of every model is computed here from its
    router logits, so that it covers the tokens of all data-parallel ranks. With context parallelism the result is this
    rank's term of a sum over the CP ranks, because `TPPlan.count_once` divides it by their number.

    Args:
        model: split or not.
        output: the output of the model's forward.
        data: the data-parallel ranks, whose batches have equally many tokens. A loss computed here is over the tokens of
            all these ranks. None: the loss is over this rank's tokens, like an `aux_loss` that the model computes itself.

    Raises:
        ModelError: the model returns another loss, an `aux_loss` without a weight, or a number without a name, which
            training would ignore.
    """
    # A tensor, DeferredLogits included, has no fields.
    names = () if isinstance(output, torch.Tensor) else dir(output)
    named = [name for name in names if name.endswith(LOSS_FIELDS)]
    # If a model sets a field of a transformers output after creating it, the attribute exists, but not the key.
    fields = {name: getattr(output, name) for name in named} | dict(
        output if isinstance(output, Mapping) else {}
    )
    losses = {name: x for name, x in fields.items() if name.endswith("_loss") and isinstance(x, torch.Tensor)}
    balance, kind = losses.pop("aux_loss", None), class_name(model)
    unnamed = output[1:] if type(output) in (tuple, list) else ()
    if any(isinstance(x, torch.Tensor) and x.numel() == 1 and x.is_floating_point() for x in unnamed):
        raise ModelError(
            f"{kind} returns a plain {type(output).__name__} with a scalar after its logits. If this is a loss, "
            "training would ignore it: let it return an object that has logits and aux_loss"
        )
    if losses:
        raise ModelError(
            f"{kind} returns {next(iter(losses))}, which training would ignore: let it return aux_loss, weighted by "
            f"{either(_WEIGHTS)} of its config"
        )
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    weight = _first(config, _WEIGHTS)
    # In a split model this is the function that the plan has installed, which returns this rank's term.
    function = getattr(inspect.unwrap(type(model).forward), "__globals__", {}).get("load_balancing_loss_func")
    logits = fields.get("router_logits")
    if weight and function is not None and logits and (balance is None or data is not None):
        logits = tuple(_gather_tokens(model, layer, data) for layer in logits)
        balance = function(logits, _first(config, _EXPERTS), _first(config, _EXPERTS_A_TOKEN))
    if balance is None:
        return None
    if weight is None:
        raise ModelError(
            f"{kind} returns aux_loss, but its config has no weight for it: set {either(_WEIGHTS)}"
        )
    return weight * balance


def _gather_tokens(model: nn.Module, logits: torch.Tensor, data: Group | None) -> torch.Tensor:
    """Gather a router's logits [tokens, experts] over the ranks of `data` and the CP ranks; the backward sums gradients.

    Without data parallelism (`data` is None or one rank) nothing is gathered.
    """
    if data is None or data[1] == 1:
        return logits
    border = border_of_model(model)
    if border is not None:
        logits = border.stream.all_tokens(logits)
    return gather(logits, 0, len(logits) * data[1], data)


def _first(config: Any, names: tuple[str, ...]) -> Any:
    """Return the first field of `config` under one of `names`, or None."""
    return next((getattr(config, name) for name in names if hasattr(config, name)), None)
