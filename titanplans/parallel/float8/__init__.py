"""Float8 products by torchao.

`conversion` says which Linear modules are converted, and checks that they are used; `all_gather` lets FSDP2 gather
their weights in float8; `scales` computes the scales of all weights in one reduction. How a converted module is split
is in `titanplans.tensor_parallel.float8_linear`.
"""

from titanplans.parallel.float8.all_gather import gather_in_float8
from titanplans.parallel.float8.conversion import (
    SMALL,
    Conversion,
    check_calls,
    check_float8_options,
    convert_to_float8,
    float8_report,
    keep_plain_between_graphs,
    refuse_read_weights,
)
from titanplans.parallel.float8.scales import seek_scales, seek_scales_together

__all__ = [
    "SMALL",
    "Conversion",
    "check_calls",
    "check_float8_options",
    "convert_to_float8",
    "float8_report",
    "gather_in_float8",
    "keep_plain_between_graphs",
    "refuse_read_weights",
    "seek_scales",
    "seek_scales_together",
]
