"""Fine-tuning: low-rank adapters (LoRA) with any plan, and frozen parameters. Start at `add.add_adapters`.

`names` matches names and patterns of the options, `targets` selects the modules, and `low_rank` has an adapter's forward.
Placements of adapters are in `titanplans.split.adapted`; peft's files, and merging adapters into weights, are in
`titanplans.weights`.
"""
