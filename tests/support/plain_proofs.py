"""`verify` with one plain training step for each case, for tests of a single fault or option."""

from functools import partial

from titanplans import proof

verify_plain = partial(proof.verify, conditions="plain")
verify_sharded = partial(verify_plain, degrees=[2], loss_parallel=True, sequence_parallel=True)
"""One case: tp 2, loss and sequence parallel."""
