"""torchtitan's cross entropy, compiled with every option of [compile]; torchtitan itself passes the backend alone."""

from dataclasses import dataclass
from typing import Any

from torchtitan.components import loss as titan

from titanplans.parallel.compile import compile_loss


class CrossEntropyLoss(titan.CrossEntropyLoss):
    """torchtitan's, a sum over tokens divided by those of the whole batch."""

    @dataclass(kw_only=True, slots=True)
    class Config(titan.CrossEntropyLoss.Config):
        """torchtitan's, whose `build` makes this class."""

    def _maybe_compile(self, compile_config: Any) -> None:
        """Compile as `compile_config` says, a `parallel.Compile`."""
        if compile_config.enable and "loss" in compile_config.components:
            self.fn = compile_loss(self.fn, compile_config)
