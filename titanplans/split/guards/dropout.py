"""Random numbers in a split model: refused, since no rank knows which of its numbers the others have to draw too.

Ranks that draw alike drop the same places of heads, or of tokens, that are not the same; ranks that don't drift apart where
they should be equal. Megatron-LM keeps two generators apart for this; here no model with dropout is split for training.
"""

from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.tensor import DeviceMesh

from titanplans.errors import PlanError

WHOLE = "leave layers whole: tensor_parallel_degree = 1, context_parallel_degree = 1"
REMEDY = f"set it to 0, or {WHOLE}"


def dropouts(model: nn.Module) -> Iterator[str]:
    """Yield each probability above 0 with which a module of `model` drops something, by name: "layers.0.attn.dropout = 0.1".

    Read off the modules: `p` of torch's Dropout, and what a module calls its dropout itself, or the jitter of a router.
    """
    for path, module in model.named_modules():
        if draws_alike(module):
            continue
        own = "Dropout" in type(module).__name__
        for name, value in vars(module).items():
            drops = (own and name == "p") or "dropout" in name or name.endswith("pdrop") or "jitter" in name
            if drops and isinstance(value, float) and value > 0:
                yield f"{path}.{name} = {value}".lstrip(".")


def draws_alike(module: nn.Module) -> bool:
    """Whether `module` draws the same numbers however the model is split, as the dropout of an adapter."""
    return getattr(module, "draws_alike", False)


def check_dropout(model: nn.Module, degree: int) -> None:
    """Refuse to split a model in training mode that would drop activations; in evaluation mode it drops none.

    Raises:
        PlanError: names the first probability above 0.
    """
    if degree > 1 and model.training and (found := next(dropouts(model), None)) is not None:
        raise PlanError(
            f"{found}: in a model that is split over {degree} ranks it would draw the same numbers for every rank's heads "
            f"and tokens, or other ones where ranks have to agree: {REMEDY}"
        )


def generator_state(mesh: DeviceMesh) -> torch.Tensor:
    """Return the state of the default generator of this rank's device, on the CPU; nothing waits for the device."""
    if mesh.device_type == "cpu":
        return torch.get_rng_state()
    return torch.get_device_module(mesh.device_type).get_rng_state()
