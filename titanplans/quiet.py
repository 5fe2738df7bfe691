"""`silence`: hide warnings of other libraries that users of our programs can't act on, each by its logger and its text.

The command and the benchmarks call it before they import a library. Importing titanplans hides nothing.
"""

import logging
import warnings

_HIDDEN_RECORDS: dict[str, tuple[str, ...]] = {
    # CUDA kernels for other torch releases or GPUs, which training in float8 or NF4 does not use.
    "torchao": ("Failed to load ", "Skipping import of cpp extensions"),
    # Caused by torchao's use of torch.
    "torch.utils._pytree": ("%s is an Enum subclass and is now natively supported by torch.compile",),
    # Caused by the recomputation of operators in compiled blocks; none of ours changes a tensor in place.
    "torch._higher_order_ops.wrap": ("\nDetected that context_fn is passed to torch.utils.checkpoint",),
    # Caused by FLA, which uses a class and names of outputs as they were in transformers before 5.24.
    "transformers.modeling_utils": ("LogLinearMamba2Model has generative capabilities",),
    "transformers.utils.generic": ("`past_key_values`/`cache_params` are deprecated",),
}
"""Logger -> the beginnings of its messages, before values are inserted."""

_HIDDEN_WARNINGS: tuple[tuple[str, type[Warning]], ...] = (
    # FLA's warning on a CPU, where titanplans.kernels replaces Triton's kernels.
    ("Triton is not supported on current platform", UserWarning),
    # Caused by torch.jit's and torchdata's use of torch.
    (r"`torch\.jit\.script_method` is deprecated", DeprecationWarning),
    ("'set_vital' is deprecated", UserWarning),
    # DTensor's random generator supports accelerators only, and nothing here draws from it.
    ("DTensor .* may not have complete support on cpu", UserWarning),
    # When a single process reads or writes a checkpoint.
    ("torch.distributed is disabled, unavailable or uninitialized, assuming the intent is to", UserWarning),
    # Caused by transformers' mixtures, when they are compiled.
    ("Dynamo detected a call to a `functools.lru_cache`-wrapped function", UserWarning),
    # Caused by FLA's configs.
    ("`rope_scaling` is deprecated", FutureWarning),
)
"""Patterns, matched from the beginning of a message, with the categories of the warnings."""

_TRAINING_RECORDS: dict[str, tuple[str, ...]] = {
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
    # Caused by debug flavors, which have a small vocabulary, or few positions.
    "transformers.configuration_utils": ("Model config: ",),
    "transformers.modeling_rope_utils": ("`rope_parameters`'s high_freq_factor field must be greater",),
}
_TRAINING_WARNINGS: tuple[tuple[str, type[Warning]], ...] = (
    ("The correction_factor is set to 1 by default", UserWarning),
    ("According to Bo, you are using a potentially buggy FLA implementation of RWKV", UserWarning),
)
"""Warnings about the speed and quality of training, which FLA repeats for each layer. A job shows them once, other commands
never."""


def silence(*, training: bool = False) -> None:
    """Hide the warnings of this module, and no others, for the rest of the process.

    Args:
        training: the program trains a model, so that warnings about speed and quality of training are shown once.
    """
    for name, beginnings in _HIDDEN_RECORDS.items():
        logging.getLogger(name).addFilter(_LimitRepeats(0, beginnings))
    for name, beginnings in _TRAINING_RECORDS.items():
        logging.getLogger(name).addFilter(_LimitRepeats(int(training), beginnings))
    for message, category in _HIDDEN_WARNINGS:
        warnings.filterwarnings("ignore", message, category)
    for message, category in _TRAINING_WARNINGS:
        warnings.filterwarnings("once" if training else "ignore", message, category)


class _LimitRepeats(logging.Filter):
    """Passes messages that begin with one of `beginnings` at most `times` times each, and all others always."""

    def __init__(self, times: int, beginnings: tuple[str, ...]):
        super().__init__()
        self.remaining = dict.fromkeys(beginnings, times)

    def filter(self, record: logging.LogRecord) -> bool:
        beginning = next((text for text in self.remaining if str(record.msg).startswith(text)), None)
        if beginning is None:
            return True
        self.remaining[beginning] -= 1
        return self.remaining[beginning] >= 0
