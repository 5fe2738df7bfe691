"""A validator whose batch and sequence length need not be those of training.

torchtitan 0.3 hands both over from [training]; [validation] has keys of its own for them.
"""

from dataclasses import dataclass
from typing import Any

import training.trainer


class Validator(training.trainer.Validator):
    """The trainer's, over batches `[own_batch_size, own_seq_len]`."""

    @dataclass(kw_only=True, slots=True)
    class Config(training.trainer.Validator.Config):
        """torchtitan's, with the sizes of [validation], under names that `build` does not hand over itself."""

        own_batch_size: int
        """Sequences at a time on one data-parallel rank."""

        own_seq_len: int
        """Tokens in a sequence."""

    def __init__(self, config: Config, **kwargs: Any):
        kwargs |= {"local_batch_size": config.own_batch_size, "seq_len": config.own_seq_len}
        super().__init__(config, **kwargs)
