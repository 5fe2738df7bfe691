"""Dropout in a split model: refused, since ranks would have to draw alike for replicas and apart for shards.

Ranks with one seed drop the same positions of different heads or tokens; ranks with different seeds diverge where they
are replicas. Megatron-LM keeps two generators for this; here no model with dropout is split for training.
"""

from collections.abc import Iterator

from torch import nn

from titanplans.errors import PlanError

WHOLE = "don't split layers: tensor_parallel_degree = 1, context_parallel_degree = 1"
REMEDY = f"set it to 0, or {WHOLE}"


def dropouts(model: nn.Module) -> Iterator[str]:
    """Yield each dropout probability above 0 of `model`, by name: "layers.0.attn.dropout = 0.1".

    Found by the names of modules' attributes: `p` of torch's Dropout, *dropout*, *pdrop, and a router's *jitter*.
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
    """Whether `module` draws the same numbers however the model is split, as an adapter's dropout does."""
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
