"""Warnings of other libraries on which no user of ours can act: each silenced by its logger or category, and its words.

`silence` is for programs (the command, the benchmarks), before they import a library. Whoever imports titanplans into a
program of their own sees what they saw before.
"""

import logging
import warnings

_NOISE: dict[str, tuple[str, ...]] = {
    # CUDA kernels of other torch releases or GPUs; none is used in float8 or NF4 as we train in them.
    "torchao": ("Failed to load ", "Skipping import of cpp extensions"),
    # torchao calls torch.
    "torch.utils._pytree": ("%s is an Enum subclass and is now natively supported by torch.compile",),
    # FLA wrote the class, and makes its outputs by the names before transformers 5.24.
    "transformers.modeling_utils": ("LogLinearMamba2Model has generative capabilities",),
    "transformers.utils.generic": ("`past_key_values`/`cache_params` are deprecated",),
}
"""Loggers, and how messages begin, before values are put in."""

_NOISE_WARNED: tuple[tuple[str, type[Warning]], ...] = (
    # FLA on a CPU, where titanplans.kernels takes its place.
    ("Triton is not supported on current platform", UserWarning),
    # torch.jit and torchdata call torch.
    (r"`torch\.jit\.script_method` is deprecated", DeprecationWarning),
    ("'set_vital' is deprecated", UserWarning),
    # DTensor's random generator exists for accelerators only; nothing here draws from it.
    ("DTensor .* may not have complete support on cpu", UserWarning),
    # One process that reads or writes a checkpoint.
    ("torch.distributed is disabled, unavailable or uninitialized, assuming the intent is to", UserWarning),
    # FLA's configs.
    ("`rope_scaling` is deprecated", FutureWarning),
)
"""Patterns that messages match from their start, and their categories."""

_OF_TRAINING: dict[str, tuple[str, ...]] = {
    **{
        f"fla.layers.{mixer}": (
            "The fast path is not available because on",
            "The CUDA backend is not available because `causal_conv1d` is None",
            f"{name} does not recommend using Triton's conv1d backend",
            "Mamba-3 fast path is not available",
        )
        for mixer, name in (
            ("mamba", "Mamba"),
            ("mamba2", "Mamba2"),
            ("mamba3", "Mamba3"),
            ("log_linear_mamba2", "LogLinearMamba2"),
        )
    },
    # A debug size has a small vocabulary, or few positions.
    "transformers.configuration_utils": ("Model config: ",),
    "transformers.modeling_rope_utils": ("`rope_parameters`'s high_freq_factor field must be greater",),
}
_OF_TRAINING_WARNED: tuple[tuple[str, type[Warning]], ...] = (
    ("The correction_factor is set to 1 by default", UserWarning),
    ("According to Bo, you are using a potentially buggy FLA implementation of RWKV", UserWarning),
)
"""Speed and quality of a training, which FLA says for each layer; a training says them once, other commands do not."""


def silence(*, training: bool = False) -> None:
    """Keep these warnings, and no others, off the screen for the rest of the process.

    Args:
        training: the program trains a model for its user, who is told once how fast and how well FLA does.
    """
    for name, starts in _NOISE.items():
        logging.getLogger(name).addFilter(_AtMost(0, starts))
    for name, starts in _OF_TRAINING.items():
        logging.getLogger(name).addFilter(_AtMost(int(training), starts))
    for message, category in _NOISE_WARNED:
        warnings.filterwarnings("ignore", message, category)
    for message, category in _OF_TRAINING_WARNED:
        warnings.filterwarnings("once" if training else "ignore", message, category)


class _AtMost(logging.Filter):
    """Lets messages that begin with one of `starts` pass `times` times, and all others always."""

    def __init__(self, times: int, starts: tuple[str, ...]):
        super().__init__()
        self.left = dict.fromkeys(starts, times)

    def filter(self, record: logging.LogRecord) -> bool:
        start = next((start for start in self.left if str(record.msg).startswith(start)), None)
        if start is None:
            return True
        self.left[start] -= 1
        return self.left[start] >= 0
