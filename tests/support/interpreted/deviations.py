"""The known deviations of FLA's kernels from their formulas, which docs/kernels.md lists too."""

from typing import NamedTuple


class Deviation(NamedTuple):
    """How a kernel deviates from its formula."""

    why: str
    states: tuple[str, ...] = ()
    """Prefixes of names of tensors. They are wrong in calls with states, even if the loss includes only the first
    output."""


_SOLVER = Deviation(
    "iterative solver: it stops at a squared residual of 1e-5, and skips small gradients; run to convergence, the "
    "results agree"
)
DEVIATIONS = {
    "fla.modules.causal_conv1d.ops:CausalConv1dFunction": Deviation(
        "no gradient passes through the oldest input of the cache, which no later token uses"
    ),
    "fla.ops.hgrn.chunk:chunk_hgrn": Deviation(
        "no gradient passes through the final or the initial state",
        states=("gradient of initial_state",),
    ),
    "fla.ops.rwkv6.fused_recurrent:fused_recurrent_rwkv6": Deviation(
        "no gradient passes through the final state"
    ),
    "fla.ops.abc.chunk:chunk_abc": Deviation(
        "the final states are wrong if the number of tokens is not a multiple of 64, and no gradient passes into the "
        "initial states",
        states=("output 2", "output 3", "gradient of initial_state", "gradient of s"),
    ),
    "fla.ops.mesa_net.chunk:chunk_mesa_net": _SOLVER,
    "fla.ops.mesa_net.decoding_one_step:mesa_net_decoding_one_step": _SOLVER,
}
"""Each deviation by the kernel's key in `REFERENCES`."""
