"""A key of a right plan, and what an operator may ask about it."""

from dataclasses import dataclass

from torch import nn
from torch.distributed.tensor import Shard

from titanplans import TPPlan
from titanplans.tensor_parallel.checks import tied_parameters
from titanplans.tensor_parallel.decoder import find_decoder
from titanplans.tensor_parallel.stream import Stream
from titanplans.tensor_parallel.styles import KVColwise, Rowwise, Style


@dataclass(frozen=True)
class Site:
    """A key of a plan, and all that an operator may ask about it."""

    key: str
    style: Style
    model: nn.Module
    plan: TPPlan

    @property
    def module(self) -> nn.Module:
        return self.model.get_submodule(self.key)

    @property
    def has_bias(self) -> bool:
        return self.module._parameters.get("bias") is not None

    @property
    def other_stream(self) -> Stream:
        """Sharded where the plan's is whole, and the reverse."""
        options = self.plan.options
        return Stream(not options.sequence_parallel, options.sequence_dim)

    @property
    def gradients(self) -> set:
        return {layout.gradient for layout in self.style.layouts(self.module).values()}

    @property
    def sharded(self) -> bool:
        return any(isinstance(layout.placement, Shard) for layout in self.style.layouts(self.module).values())

    @property
    def tied(self) -> bool:
        names = [name for group in tied_parameters(self.model) for name in group]
        return any(name.rpartition(".")[0] == self.key for name in names)

    @property
    def head_rows(self) -> int | None:
        """Rows (columns, of a Rowwise) of one head; None outside of mixers."""
        decoder = find_decoder(self.model, required=False)
        if (around := decoder.mixer_around(self.key)) is None:
            return None
        mixer = decoder.mixers[around]
        heads = next(iter(self.plan.heads(mixer).values()))
        if isinstance(self.style, KVColwise):
            heads = self.plan.kv_heads(mixer) or heads
        size = self.module._parameters["weight"].shape[isinstance(self.style, Rowwise)]  # type: ignore[union-attr]
        return size // heads
