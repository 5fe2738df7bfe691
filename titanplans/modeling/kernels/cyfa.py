"""FLA's reference of cyclic flow attention, without its cache.

The reference keeps a table of sines by device and size alone, not by dtype, and would keep one of simulated ranks.
"""

import functools
from typing import Any

from fla.ops.cyfa import naive, utils

from titanplans.modeling.kernels.packing import Result


@functools.wraps(naive.naive_recurrent_cyfa)
def recurrent_cyfa(*args: Any, **kwargs: Any) -> Result:
    """The reference, with its arguments and results."""
    utils._readout_basis.cache_clear()
    try:
        return naive.naive_recurrent_cyfa(*args, **kwargs)
    finally:
        utils._readout_basis.cache_clear()
