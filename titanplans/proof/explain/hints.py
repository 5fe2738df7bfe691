"""What a plan may have got wrong where the numbers show a place and no certain fault."""

from collections.abc import Mapping

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from titanplans.plan.decoder import within
from titanplans.plan.plan import TPPlan
from titanplans.plan.styles.base import own_styles
from titanplans.plan.styles.projections import Packed

ADDED_LOSS = (
    "the model adds a loss to that of its logits, and model_functions of {} is empty: name the function that computes it "
    "there with self.count_once, or each rank counts it by itself"
)


def sections_to_check(name: str, styles: Mapping[str, ParallelStyle]) -> str:
    """Return the packed sections in the region around the module `name`, which its code may split otherwise; "" if none."""
    own = own_styles(styles)
    around = [key for key in own if own[key].opens and (name == key or within(name, key))]
    region = max(around, key=len, default="")
    found = {
        key.removeprefix(f"{region}."): " + ".join(
            str(s if isinstance(s, int) else s.size) for s in style.sections
        )
        for key, style in own.items()
        if around and isinstance(style, Packed) and within(key, region)
    }
    said = " and of ".join(f"{key} ({sections})" for key, sections in found.items())
    return f"check the sections of {said} against the order in which the code splits them" if found else ""


def added_loss_to_name(plan: TPPlan, model: nn.Module, *, adds_loss: bool) -> str:
    """Return what `plan` has to say of a loss that the whole `model` adds; "" if it does, or if there is none."""
    return ADDED_LOSS.format(type(plan).__name__) if adds_loss and not plan.model_functions(model) else ""
