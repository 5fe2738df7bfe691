"""The balance of a model's routers: a term that the model adds to its loss, or biases that nothing here moves."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from titanplans.errors import ModelError, either
from titanplans.split.state import border_of_model
from titanplans.text import class_name, some

_WEIGHTS = ("router_aux_loss_coef", "aux_loss_scale")
"""Under these names configs keep the weight of the balance of routers."""
_BALANCING = ("e_score_correction_bias", "expert_bias", "balancing_biases")
"""What transformers' routers call the bias that is to keep their experts equally busy."""
_EXPERTS = ("num_experts", "num_local_experts", "num_memories")
_EXPERTS_A_TOKEN = ("num_experts_per_tok", "topk")


def added_loss(model: nn.Module, output: Any) -> torch.Tensor | None:
    """Return what `model` adds to the mean cross entropy of its batch: its routers' balance, weighted; a scalar or None.

    With context parallelism, this rank's part of it: all of them together make the whole.

    A model returns it as `aux_loss`, and its config holds the weight. One that returns its routers' logits, and computes
    their balance only together with its own loss, gets it by the function of its file that does so.

    Raises:
        ModelError: it returns another loss, or an `aux_loss` without a weight: training would leave it out.
    """
    fields = output if isinstance(output, Mapping) else getattr(output, "__dict__", {})
    given = {name: x for name, x in fields.items() if name.endswith("_loss") and isinstance(x, torch.Tensor)}
    balance, kind = given.pop("aux_loss", None), class_name(model)
    if given:
        raise ModelError(
            f"{kind} returns {next(iter(given))}, which nothing adds to the loss: let it return aux_loss, weighted by "
            f"{either(_WEIGHTS)} of its config"
        )
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    weight = _first(config, _WEIGHTS)
    if balance is not None:
        if weight is None:
            raise ModelError(
                f"{kind} returns aux_loss, but its config has no weight of it: {either(_WEIGHTS)}"
            )
        return weight * balance / _parts(model)
    # This rank's, where the model is split.
    function = getattr(type(model).forward, "__globals__", {}).get("load_balancing_loss_func")
    if weight and function is not None and (logits := fields.get("router_logits")):
        return (
            weight
            / _parts(model)
            * function(logits, _first(config, _EXPERTS), _first(config, _EXPERTS_A_TOKEN))
        )
    return None


def _parts(model: nn.Module) -> int:
    """Return how many ranks compute the balance of all tokens, whose losses are summed."""
    border = border_of_model(model)
    return 1 if border is None or border.tokens is None else border.tokens.ranks


def still_biases(model: nn.Module) -> str | None:
    """Return in words which biases of `model`'s routers no gradient moves, and so nothing in a job; None if it has none."""
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    tensors = [*frozen, *(name for name, _ in model.named_buffers())]
    if not (found := [name for name in tensors if name.endswith(_BALANCING)]):
        return None
    return (
        f"nothing moves the routers' balance biases ({some(found, most=1)}): they stay as they are initialised or loaded, "
        "so nothing keeps the experts equally busy"
    )


def _first(config: Any, names: tuple[str, ...]) -> Any:
    """Return the first field of `config` under one of `names`, or None."""
    return next((getattr(config, name) for name in names if hasattr(config, name)), None)
