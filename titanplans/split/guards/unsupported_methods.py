"""Refuse methods that take the parameters of a split model for full tensors: `refuse_unsupported_methods`.

torch's modules and transformers' models have such methods. Each rank would initialise its shard as if it were the full
tensor, resize its rows, or write a file of shards, without an error. `DistributedDataParallel` fails with an error that does
not name the cause.
"""

from functools import partial
from typing import Any, NoReturn

from torch import nn
from torch.distributed.tensor import DTensor

from titanplans.errors import PlanError
from titanplans.split.adapted import ADAPTERS
from titanplans.text import class_name

_INITIALISE = (
    "call titanplans.modeling.initialize(model, seed=0) for a model of transformers or FLA, which gives the same "
    "values however it is split, or load full tensors with load_state_dict"
)
_BEFORE = "call it before the model is split"
_REFUSED = {
    "init_weights": _INITIALISE,
    "initialize_weights": _INITIALISE,
    "_init_weights": _INITIALISE,
    "reset_parameters": _INITIALISE,
    "tie_weights": "tied weights are still tied; after to_empty() " + _INITIALISE,
    "resize_token_embeddings": _BEFORE,
    "set_input_embeddings": _BEFORE,
    "set_output_embeddings": _BEFORE,
    "add_adapter": ADAPTERS,
    "load_adapter": ADAPTERS,
}
"""Maps each method to its remedy."""


def refuse_unsupported_methods(model: nn.Module) -> None:
    """Let the methods in `_REFUSED` of `model` and of its modules, and DDP around the model, raise a PlanError.

    `save_pretrained` raises only if it gets no full state dict.
    """
    if any(isinstance(param, DTensor) for param in model.parameters()):
        model.__dict__["_ddp_params_and_buffers_to_ignore"] = _NoDDP()
    for module in model.modules():
        for name, remedy in _REFUSED.items():
            if callable(getattr(module, name, None)):
                module.__dict__[name] = partial(_refuse, class_name(module), name, remedy)
        if callable(getattr(module, "save_pretrained", None)):
            module.__dict__["save_pretrained"] = partial(_save, module)


class _NoDDP:
    """Stands for the names that `DistributedDataParallel` ignores: DDP iterates over them first, and so raises this
    error."""

    def __iter__(self) -> NoReturn:
        raise PlanError(
            "DistributedDataParallel can't wrap a split model, because it can't reduce DTensors, which the parameters "
            "are: use ParallelManager(FSDP2Config(), Degrees(tp=..., dp_replicate=...)), or fully_shard over the "
            "data-parallel mesh"
        )


def _refuse(model: str, name: str, remedy: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise PlanError(
        f"{model}.{name} takes the parameters for full tensors, but each rank holds shards: {remedy}"
    )


def _save(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    state = kwargs.get("state_dict")
    if state is None or any(isinstance(value, DTensor) for value in state.values()):
        raise PlanError(
            f"{class_name(model)}.save_pretrained would write this rank's shards: titanplans.save_weights(model, folder), "
            "called on every rank, writes full tensors; or on rank 0 save_pretrained(folder, state_dict=state) with "
            "state = titanplans.gather_full_state_dict(model) from every rank"
        )
    return type(model).save_pretrained(model, *args, **kwargs)  # type: ignore[attr-defined]
