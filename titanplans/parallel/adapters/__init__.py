"""Fine-tuning: low-rank adapters on any plan, and frozen parts.

`names` says what a name or a pattern of the options matches, `add` gives modules their adapters and freezes the rest,
`merge` adds adapters to the weights, `peft` reads and writes peft's files. How an adapter computes, and how it is split, is
in `titanplans.tensor_parallel.low_rank`.
"""

from titanplans.parallel.adapters.add import Adapters, add_adapters, freeze

__all__ = ["Adapters", "add_adapters", "freeze"]
