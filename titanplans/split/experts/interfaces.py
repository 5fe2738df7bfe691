"""The three signatures of the forward of a module of experts, told apart by the number of arguments: `interface_of`."""

import inspect

from torch import nn

CHOSEN = 3
"""transformers: hidden states [N, H], expert ids [N, k] and weights [N, k]."""
COUNTED = 2
"""torchtitan: tokens [N, H] sorted by expert, and the number of tokens of each expert [experts]."""
EVERY = 1
"""Llama 4: every token once for each expert [experts * N, H], sorted by expert. Tokens not routed to an expert are
zeros."""


def interface_of(module: nn.Module) -> int | None:
    """Return `CHOSEN`, `COUNTED` or `EVERY`, the signature of `module`; None if it holds no experts with one of these."""
    # The forward of a split module may have another signature.
    cls = getattr(type(module), "unsplit_class", type(module))
    argument_count = len(inspect.signature(cls.forward).parameters) - 1
    has_experts = hasattr(module, "num_experts") and any(
        param.ndim == 3 for param in module.parameters(recurse=False)
    )
    return argument_count if has_experts and argument_count in (CHOSEN, COUNTED, EVERY) else None
