"""Checks of a plan against a model, before anything changes. They use only names and shapes, so they run on meta.

`keys` runs while a plan is resolved, the others in the order of `titanplans.apply.check`:

    keys      each key matches something, each parameter has a key
    shared    all keys of one module or tensor agree
    regions   each region has one sum over the ranks, and mixers see all tokens
    packed    a packed projection is split section by section
    sizes     the degrees divide the sizes
    code      the attributes and functions that a plan names exist in the modules' code
"""
