"""The style that would sum a gradient that is not summed, by the place of the parameter."""

from collections.abc import Mapping, Sequence

from torch.distributed.tensor.parallel import ParallelStyle

from titanplans.plan.decoder import Decoder, within
from titanplans.plan.options import TPOptions
from titanplans.plan.styles.base import own_styles
from titanplans.plan.styles.replicated import Whole


def summing_style(
    name: str,
    styles: Mapping[str, ParallelStyle],
    order: Sequence[str],
    decoder: Decoder,
    options: TPOptions,
) -> str:
    """Return the style that sums the gradient of a replicated parameter over the ranks, as a plan calls it; "" if unclear.

    In a region it is the region's; behind its sum and outside of regions the stream's, where each rank has a share of the
    gradient only with sequence parallelism.

    Args:
        name: of the parameter.
        styles: of the plan, by fully qualified name; foreign ones don't say where regions are.
        order: the modules as they finished in the whole model's forward.
        decoder: of the model.
        options: of the case.
    """
    own, module = own_styles(styles), name.rpartition(".")[0]
    around = [key for key in own if module == key or within(module, key)]
    if len(own) < len(styles) or any(isinstance(own[key], Whole) for key in around):
        return ""
    region = max((key for key in around if own[key].opens), key=len, default=None)
    if region is None:
        on_stream = module == decoder.norm or any(within(module, block) for block in decoder.names)
    else:
        closing = [key for key, style in own.items() if style.closes and within(key, region)]
        if module == region and closing and options.sequence_parallel:
            return ""  # the module's code may read the parameter on either side of the sum
        finished = {key: at for at, key in enumerate(order)}
        on_stream = any(finished.get(key, len(order)) < finished.get(module, -1) for key in closing)
    if not on_stream:
        return "" if region is None else "replicated_in_region()"
    return "replicated_on_stream()" if options.sequence_parallel else ""
