"""How the forward of a module of experts is called: what it takes tells how rows reach their experts."""

import inspect

from torch import nn

CHOSEN = 3
"""transformers' experts are called with hidden states [N, H], the numbers of their experts [N, k] and weights [N, k]."""
COUNTED = 2
"""torchtitan's, with rows [N, H] in the order of their experts, and how many of them each expert has [experts]."""
EVERY = 1
"""Llama 4's, with every row for every expert [experts * N, H], expert by expert: zeros where it was not chosen."""


def interface_of(module: nn.Module) -> int | None:
    """Return `CHOSEN`, `COUNTED` or `EVERY`, as `module` is called; None if it holds no experts that are called so."""
    cls = getattr(type(module), "unsplit_class", type(module))  # of a split module that before the split
    taken = len(inspect.signature(cls.forward).parameters) - 1
    holds = hasattr(module, "num_experts") and any(
        param.ndim == 3 for param in module.parameters(recurse=False)
    )
    return taken if holds and taken in (CHOSEN, COUNTED, EVERY) else None
