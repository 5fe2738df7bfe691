"""Activation checkpointing: which blocks are computed a second time in the backward.

The policies that look into a block (full, per operator, memory budget) are torchtitan's; what is
here is where they are applied, and the one that torchtitan 0.3 no longer has.
"""

from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from parallel.errors import ParallelError
from plans.structure import find_decoder


class Policy(Protocol):
    """Something that wraps the blocks of a decoder, found under `layers`."""

    def apply(self, model: nn.Module) -> None:
        """Wrap the children of `model.layers` in place."""
        ...


@dataclass(frozen=True)
class EveryNthLayer:
    """Recompute every n-th block and keep the others: torchtitan 0.2's integer `selective_ac_option`."""

    n: int
    preserve_rng_state: bool = True

    def __post_init__(self) -> None:
        if self.n < 1:
            raise ParallelError(
                f"selective_ac_option = {self.n}: every how many layers? A whole number from 1 up"
            )

    def build(self, *, dump_folder: str) -> "EveryNthLayer":
        """Return the policy itself: it has no state, and writes nothing to `dump_folder`."""
        return self

    def apply(self, model: nn.Module) -> None:
        """Wrap blocks n-1, 2n-1, … of `model.layers`, in place."""
        layers = model.get_submodule("layers")
        for index, (name, block) in enumerate(list(layers.named_children())):
            if (index + 1) % self.n == 0:
                wrapped = checkpoint_wrapper(
                    block, preserve_rng_state=self.preserve_rng_state, early_stop=False
                )
                layers.register_module(name, wrapped)


def apply_activation_checkpointing(model: nn.Module, ac_config: Any, dump_folder: str) -> None:
    """Apply the policy that `ac_config` builds to the blocks of `model`, in place."""
    policy: Policy = ac_config.build(dump_folder=dump_folder)
    policy.apply(_Blocks(model))


class _Blocks(nn.Module):
    """The blocks of any decoder under the name that policies look for."""

    def __init__(self, model: nn.Module):
        super().__init__()
        first = find_decoder(model).layers[0]
        self.layers = model.get_submodule(first.rpartition(".")[0])
