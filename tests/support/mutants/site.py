"""A key of a correct plan, with the properties that the operators use."""

from dataclasses import dataclass, replace

from torch import nn
from torch.distributed.tensor import Shard

from titanplans import TPPlan
from titanplans.plan.checks.shared import tied_parameters
from titanplans.split.decoder import find_decoder
from titanplans.split.layout import StreamLayout
from titanplans.styles.base import SplitOver, Style
from titanplans.styles.kv_colwise import KVColwise
from titanplans.styles.rowwise import Rowwise


@dataclass(frozen=True)
class Site:
    """A key of a plan, the style at this key, the model, and the plan."""

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
    def over(self) -> SplitOver:
        return SplitOver(self.plan.options.degrees.tp, self.plan.options.stream)

    @property
    def shares_heads(self) -> bool:
        """Whether several ranks share a key/value head."""
        return isinstance(self.style, KVColwise) and self.over.degree > self.style.heads

    @property
    def other_stream(self) -> StreamLayout:
        """The sharded layout if the plan's stream is replicated, and the reverse."""
        options = self.plan.options
        return replace(options, sequence_parallel=not options.sequence_parallel).stream

    @property
    def gradients(self) -> set:
        return {layout.gradient for layout in self.style.layouts(self.module, self.over).values()}

    @property
    def is_sharded(self) -> bool:
        return any(
            isinstance(layout.placement, Shard)
            for layout in self.style.layouts(self.module, self.over).values()
        )

    @property
    def is_tied(self) -> bool:
        names = [name for group in tied_parameters(self.model) for name in group]
        return any(name.rpartition(".")[0] == self.key for name in names)

    @property
    def head_rows(self) -> int | None:
        """The number of weight rows (columns, if the style is Rowwise) that belong to one head; None outside of mixers."""
        decoder = find_decoder(self.model, required=False)
        if (mixer_name := decoder.mixer_around(self.key)) is None:
            return None
        mixer = decoder.mixers[mixer_name]
        heads = next(iter(self.plan.heads(mixer).values()))
        if isinstance(self.style, KVColwise):
            heads = self.plan.kv_heads(mixer) or heads
        size = self.module._parameters["weight"].shape[isinstance(self.style, Rowwise)]  # type: ignore[union-attr]
        return size // heads

    @property
    def likeness(self) -> tuple:
        """A value that is equal for sites at which two plans agree: library, position in the model, the style and its
        settings."""
        decoder = find_decoder(self.model)
        block = next((name for name in decoder.names if self.key.startswith(f"{name}.")), None)
        mixer = next((m for n, m in decoder.mixers.items() if f"{self.key}.".startswith(f"{n}.")), None)
        library = type(self.model).__module__.partition(".")[0]
        tower = any(
            self.key.startswith(f"{name.split('.layers.')[0]}.") for names in decoder.towers for name in names
        )
        settings = tuple(
            (k, v) for k, v in sorted(vars(self.style).items()) if isinstance(v, bool | int | str | None)
        )
        return (
            library,
            # FLA's mixers compute different functions between their projections; transformers' are all softmax attention.
            type(mixer).__name__ if mixer is not None and library == "fla" else None,
            self.key.removeprefix(f"{block}.")
            if block
            else self.key
            if tower
            else self.key.rpartition(".")[2],
            type(self.style).__name__,
            settings,
            # A split embedding becomes a subclass of its class, which may scale its output.
            type(self.module).__name__ if isinstance(self.module, nn.Embedding) else None,
            self.is_tied,
        )
