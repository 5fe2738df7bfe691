"""Refuse to split a model with dropout for training: `check_dropout`."""

from collections.abc import Iterator

from torch import nn

from titanplans.errors import PlanError

UNSPLIT = "don't split layers (tensor_parallel_degree = 1, context_parallel_degree = 1)"
REMEDY = f"set it to 0, or {UNSPLIT}"


def dropouts(model: nn.Module) -> Iterator[str]:
    """Yield each dropout probability of `model` above 0 with its name: "layers.0.attn.dropout = 0.1".

    They are found by attribute names: `p` of torch's Dropout, *dropout*, *pdrop, and a router's *jitter*.
    """
    for path, module in model.named_modules():
        if is_split_invariant(module):
            continue
        is_dropout = "Dropout" in type(module).__name__
        for name, value in vars(module).items():
            drops = (
                (is_dropout and name == "p")
                or "dropout" in name
                or name.endswith("pdrop")
                or "jitter" in name
            )
            if drops and isinstance(value, float) and value > 0:
                yield f"{path}.{name} = {value}".lstrip(".")


def is_split_invariant(module: nn.Module) -> bool:
    """Whether `module` draws the same random numbers however the model is split, as an adapter's dropout does."""
    return getattr(module, "is_split_invariant", False)


def check_dropout(model: nn.Module, degree: int) -> None:
    """Refuse to split a model in training mode that has dropout; in evaluation mode nothing is dropped.

    Ranks would have to draw equal numbers for replicas and different ones for shards. With one seed they drop the same
    positions of different heads or tokens; with different seeds replicas diverge. Megatron-LM keeps two generators for
    this.

    Raises:
        PlanError: names the first probability above 0.
    """
    if degree > 1 and model.training and (dropout := next(dropouts(model), None)) is not None:
        raise PlanError(
            f"{dropout}: a model that is split over {degree} ranks would draw the same numbers for every rank's heads and "
            f"tokens, or different numbers on ranks that have to agree: {REMEDY}"
        )
