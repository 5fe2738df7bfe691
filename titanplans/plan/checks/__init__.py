"""Checks of a plan against a model, before anything moves.

`keys` runs while a plan is resolved, the others in the order of `titanplans.apply.check`.

`keys`: each key names something, each parameter has a key. `shared`: keys of one module or tensor agree. `regions`: sums are
complete, and mixers see all tokens. `packed`: a packed projection is split section by section. `sizes`: the degrees divide.
`code`: what a plan says of a module's code is there. All read names and shapes, so they hold on meta and need no process
group.
"""
