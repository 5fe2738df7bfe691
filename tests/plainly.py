"""`verify` by one plain step for each choice of options: what tests of one fault, or of one option, need."""

from functools import partial

from titanplans import proof

verify = partial(proof.verify, conditions="plain")
sharded = partial(verify, degrees=[2], loss_parallel=True, sequence_parallel=True)
"""At degree 2 with all that can be sharded: one case, unless more degrees are given."""
