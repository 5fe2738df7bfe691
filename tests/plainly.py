"""`verify` by one plain step for each choice of options: what tests of one fault, or of one option, need."""

from functools import partial

from titanplans import proof

verify = partial(proof.verify, conditions="plain")
