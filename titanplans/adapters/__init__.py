"""Fine-tuning: low-rank adapters on any plan, and frozen parts.

`names` says what a name or a pattern of the options matches, `targets` which modules that are, and `add` gives them their
adapters and freezes the rest. How an adapter computes, and how it is split, is in `titanplans.adapters.low_rank`,
peft's files and the sum of adapters and weights in `titanplans.weights`.
"""
