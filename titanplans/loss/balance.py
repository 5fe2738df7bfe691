"""The balance of a model's routers as a term of its loss. Biases that keep it: `titanplans.split.experts.loads`."""

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
"""Under these names configs keep the weight of the balance of routers."""
_EXPERTS = ("num_experts", "num_local_experts", "num_memories")
_EXPERTS_A_TOKEN = ("num_experts_per_tok", "topk")


def added_loss(model: nn.Module, output: Any, data: Group | None = None) -> torch.Tensor | None:
    """Return what `model` adds to the mean cross entropy of its batch: its routers' balance, weighted; a scalar or None.

    With context parallelism, this rank's part of it, as `TPPlan.count_once` makes it: all of them together make the whole.

    A model returns it as `aux_loss`, and its config holds the weight. One that returns its routers' logits, and computes
    their balance only together with its own loss, gets it by the function of its file that does so.

    Args:
        model: split or not.
        output: of its forward.
        data: the ranks of data parallelism, whose batches have as many tokens: the balance by such a function is that of
            all their tokens. What a model returns itself is that of this rank's.

    Raises:
        ModelError: it returns another loss, an `aux_loss` without a weight, or a number without a name: training would
            leave it out.
    """
    names = (
        () if isinstance(output, torch.Tensor) else dir(output)
    )  # logits that a fused head leaves out have none
    named = [name for name in names if name.endswith(LOSS_FIELDS)]
    # A value that is set on an output of transformers is an attribute, and no key.
    fields = {name: getattr(output, name) for name in named} | dict(
        output if isinstance(output, Mapping) else {}
    )
    given = {name: x for name, x in fields.items() if name.endswith("_loss") and isinstance(x, torch.Tensor)}
    balance, kind = given.pop("aux_loss", None), class_name(model)
    unnamed = output[1:] if type(output) in (tuple, list) else ()
    if any(isinstance(x, torch.Tensor) and x.numel() == 1 and x.is_floating_point() for x in unnamed):
        raise ModelError(
            f"{kind} returns a plain {type(output).__name__} with a number after its logits, a loss perhaps, which nothing "
            "adds: let it return an object that has logits and aux_loss"
        )
    if given:
        raise ModelError(
            f"{kind} returns {next(iter(given))}, which nothing adds to the loss: let it return aux_loss, weighted by "
            f"{either(_WEIGHTS)} of its config"
        )
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    weight = _first(config, _WEIGHTS)
    # This rank's, where the model is split.
    function = getattr(inspect.unwrap(type(model).forward), "__globals__", {}).get("load_balancing_loss_func")
    logits = fields.get("router_logits")
    if weight and function is not None and logits and (balance is None or data is not None):
        logits = tuple(_of_all(model, one, data) for one in logits)
        balance = function(logits, _first(config, _EXPERTS), _first(config, _EXPERTS_A_TOKEN))
    if balance is None:
        return None
    if weight is None:
        raise ModelError(f"{kind} returns aux_loss, but its config has no weight of it: {either(_WEIGHTS)}")
    return weight * balance


def _of_all(model: nn.Module, logits: torch.Tensor, data: Group | None) -> torch.Tensor:
    """Return the logits [tokens, experts] of all ranks of `data`, and of context parallelism; gradients are summed."""
    if data is None or data[1] == 1:
        return logits
    border = border_of_model(model)
    if border is not None:
        logits = border.stream.all_tokens(logits)
    return gather(logits, 0, len(logits) * data[1], data)


def _first(config: Any, names: tuple[str, ...]) -> Any:
    """Return the first field of `config` under one of `names`, or None."""
    return next((getattr(config, name) for name in names if hasattr(config, name)), None)
