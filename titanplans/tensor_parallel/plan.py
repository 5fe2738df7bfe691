"""`TPPlan`: what a model-parallel plan is, and the parts that most architectures share.

A plan maps module names to styles, part by part: the model's ends (`model_plan`), a block
(`layer_plan`), its token mixer (`attn_plan`), its MLP (`mlp_plan`). A subclass overrides only what
differs. Which module may be split how is checked in `checks`, not here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from titanplans.errors import PlanError
from titanplans.tensor_parallel.decoder import find_block, find_decoder, join
from titanplans.tensor_parallel.float8 import Recipe
from titanplans.tensor_parallel.layout import Section, Shared, rows_of
from titanplans.tensor_parallel.local_code import Functions
from titanplans.tensor_parallel.norms import GatheredInRegion, SplitNorm, Statistic
from titanplans.tensor_parallel.projections import Colwise, KVColwise, Packed, Rowwise, RowwiseInRegion
from titanplans.tensor_parallel.registry import mixer_plan_of, plan_for_mixer
from titanplans.tensor_parallel.replicated import (
    AddedToSum,
    EndOfStream,
    ReplicatedInRegion,
    ReplicatedOffStream,
    ReplicatedOnStream,
    Whole,
)
from titanplans.tensor_parallel.stream import Stream
from titanplans.tensor_parallel.styles import Region
from titanplans.tensor_parallel.vocab import VocabEmbedding, VocabHead

Plan = dict[str, ParallelStyle]

QUERY_HEADS = ("num_heads", "num_attention_heads")
"""Under these names a mixer or its config counts query heads."""

KV_HEADS = ("num_kv_heads", "num_key_value_heads")
"""Under these names a mixer or its config counts key/value heads."""

_GROUPS = ("num_kv_groups", "num_key_value_groups")
"""Under these names flash-linear-attention and transformers keep queries per key/value head."""


@dataclass(frozen=True)
class TPOptions:
    """What a plan has to honour or refuse."""

    degree: int
    """Number of ranks over which a layer is split."""

    loss_parallel: bool = True
    """The logits stay sharded over the vocabulary, for a loss that works on shards."""

    sequence_parallel: bool = True
    """Between regions, each rank holds its shard of the sequence."""

    sequence_dim: int = 1
    """Dimension of the hidden states that is the sequence: 1 in [batch, sequence, hidden]."""

    float8: Recipe | Literal["none"] = "none"
    """The recipe by which the model's Linear modules were converted to float8."""


class TPPlan:
    """The tensor-parallel plan of an architecture. Subclass it, and register the subclass.

    Each `*_plan` method gets the module that it plans and returns `{name relative to it: style}`,
    where "" is the module itself.
    """

    def __init__(self, options: TPOptions):
        self.options = options
        self.stream = Stream(options.sequence_parallel, options.sequence_dim)

    # The parts of a model.

    def model_plan(self, model: nn.Module) -> Plan:
        """Plan what stands outside the blocks: embedding, final norm, head."""
        decoder = find_decoder(model)
        plan: Plan = {}
        if decoder.embedding is not None:
            plan[decoder.embedding] = self.vocab_embedding()
        if decoder.norm is not None:
            plan[decoder.norm] = self.replicated_on_stream()
        if decoder.head is not None:
            plan[decoder.head] = self.vocab_head()
        return plan

    def layer_plan(self, layer: nn.Module) -> Plan:
        """Plan a block: its norms, and by `attn_plan` and `mlp_plan` its mixer and its MLP.

        A mixer whose class belongs to another registered plan is planned by that one.
        """
        block = find_block(layer)
        plan: Plan = {name: self.replicated_on_stream() for name in block.norms}
        if block.mixer is not None:
            mixer = layer.get_submodule(block.mixer)
            plan |= prefixed(block.mixer, self.plan_of(mixer).attn_plan(mixer))
        if block.mlp is not None:
            plan |= prefixed(block.mlp, self.mlp_plan(layer.get_submodule(block.mlp)))
        return plan

    def attn_plan(self, attn: nn.Module) -> Plan:
        """Plan a token mixer."""
        raise NotImplementedError(
            f"{type(self).__name__} must say how {type(attn).__name__} is split: attn_plan"
        )

    def mlp_plan(self, mlp: nn.Module) -> Plan:
        """Plan a gated MLP of gate_proj, up_proj and down_proj."""
        return {
            **self.mlp_input(),
            "gate_proj": self.colwise(),
            "up_proj": self.colwise(),
            "down_proj": self.rowwise(),
        }

    def heads(self, attn: nn.Module) -> dict[str, int]:
        """Return the head counts of a mixer by name: of the query heads and, if it says, of the key/value heads.

        They are attributes of the module, or else of its config. Override this for a mixer that counts otherwise: each
        count has to be a multiple of the degree, but for those under a name of `KV_HEADS` where ranks share heads.
        """
        return _first_count(attn, QUERY_HEADS) | _first_count(attn, KV_HEADS)

    def kv_heads(self, attn: nn.Module) -> int | None:
        """Return how many key/value heads a mixer has; None if `heads` does not say: then as many as query heads."""
        return next((count for name, count in self.heads(attn).items() if name in KV_HEADS), None)

    def local_attributes(self, attn: nn.Module) -> dict[str, int]:
        """Return the attributes of a mixer that must count this rank's heads, and their values.

        Only ratios and sizes that a mixer's code does not read off its tensors: how many query heads
        share a key/value head is another number where ranks share the latter.
        """
        kv = self.kv_heads(attn)
        queries = [count for name, count in self.heads(attn).items() if name not in KV_HEADS]
        if kv is None or self.options.degree <= kv or not queries:
            return {}
        return {name: queries[0] // self.options.degree for name in _GROUPS if hasattr(attn, name)}

    def divided(self, attn: nn.Module, *names: str) -> dict[str, int]:
        """Return attributes of a mixer that count heads or widths, by dotted name, divided by the degree.

        Raises:
            PlanError: the mixer has no such attribute, or the degree does not divide it.
        """
        values = {}
        for name in names:
            value = attn
            for step in name.split("."):
                value = getattr(value, step, None)  # type: ignore[assignment]
            if not isinstance(value, int) or value % self.options.degree:
                raise PlanError(
                    f"{type(attn).__name__}.{name} = {value!r} is no multiple of tensor_parallel_degree = "
                    f"{self.options.degree}, by which {type(self).__name__} divides it"
                )
            values[name] = value // self.options.degree
        return values

    def local_functions(self, attn: nn.Module) -> Functions:
        """Return what makes this rank's functions of those that a mixer's code calls, by name.

        For functions with global knowledge, such as a decay that depends on a head's number. Each gets the function and
        the rank's `Place`, and returns what the code is to call in its place.
        """
        return {}

    # What a plan is made of.

    def attn_input(self, input_name: str = "hidden_states", *, float8_input: bool = True) -> Plan:
        """Gather the sequence once, before all projections of a mixer; a `rowwise` inside reduces."""
        return self._region(input_name, False, float8_input)

    def attn_region(self, input_name: str = "hidden_states", *, float8_input: bool = True) -> Plan:
        """Gather at a mixer's entry and reduce at its exit; its `rowwise` has `reduce_output=False`."""
        return self._region(input_name, True, float8_input)

    def mlp_input(self, input_name: str = "x", *, float8_input: bool = True) -> Plan:
        """Gather the sequence once, before gate and up."""
        return self._region(input_name, False, float8_input)

    def mlp_region(self, input_name: str = "x", *, float8_input: bool = True) -> Plan:
        """Gather at an MLP's entry and reduce at its exit, for fused kernels that read `down_proj.weight`."""
        return self._region(input_name, True, float8_input)

    def _region(self, input_name: str, reduce_output: bool, float8_input: bool) -> Plan:
        region = Region(
            stream=self.stream,
            reduce_output=reduce_output,
            input_name=input_name,
            float8_input=float8_input,
        )
        return {"": region}

    def colwise(self, *, dim: int = 0) -> ParallelStyle:
        """Shard a module's outputs or channels, or one parameter by heads: dimension `dim`."""
        return Colwise(dim=dim)

    def kv_colwise(self, attn: nn.Module) -> ParallelStyle:
        """Shard a projection to the keys or values of `attn` by heads, which ranks share where there are too few."""
        kv = self.kv_heads(attn)
        return Colwise() if kv is None else KVColwise(heads=kv, degree=self.options.degree)

    def packed(self, *sections: Section, dim: int = 0) -> ParallelStyle:
        """Shard each section of a packed projection: so many rows in even shares, or `self.shared(rows, heads)`."""
        return Packed(sections=sections, degree=self.options.degree, dim=dim)

    def shared(self, rows: int, heads: int = 1) -> Section:
        """Return a section of `packed` whose heads ranks share where there are too few; one head is read by all."""
        return Shared(rows, heads)

    def rowwise(self, *, reduce_output: bool = True, dim: int = 1) -> ParallelStyle:
        """Shard a Linear's inputs, dimension `dim` of its weight, and sum its output over the ranks."""
        return Rowwise(stream=self.stream, reduce_output=reduce_output, degree=self.options.degree, dim=dim)

    def rowwise_in_region(self) -> ParallelStyle:
        """Shard a Linear's inputs, and give every rank the sum: the region goes on behind it."""
        return RowwiseInRegion()

    def split_norm(
        self, *, heads: int | None = None, rows: int = 0, statistic: Statistic | None = None
    ) -> ParallelStyle:
        """Shard the width of a norm, and average its mean square over the ranks.

        Args:
            heads: that the width counts, where ranks may share them, and `rows`, their width.
            statistic: see `SplitNorm`.
        """
        shared = heads is not None and heads < self.options.degree
        own = rows_of(0, [Shared(rows, heads)], self.options.degree) if shared else None  # type: ignore[arg-type]
        return SplitNorm(rows=own, statistic=statistic)

    def gathered_in_region(self) -> ParallelStyle:
        """Run a module inside a region on the whole width, gathered, and keep this rank's part of its output."""
        return GatheredInRegion()

    def replicated_in_region(self) -> ParallelStyle:
        """Replicate a module inside a region, such as a norm over each head: its gradient is a sum over the ranks."""
        return ReplicatedInRegion()

    def added_to_sum(self) -> ParallelStyle:
        """Replicate what is added to each rank's part of a sum, such as experts' biases: each adds its part of it."""
        return AddedToSum(degree=self.options.degree)

    def replicated_on_stream(self) -> ParallelStyle:
        """Replicate a module on the residual stream, such as a block's norm: it works token by token."""
        return ReplicatedOnStream(stream=self.stream)

    def replicated_off_stream(self) -> ParallelStyle:
        """Replicate what does the same on every rank, such as a vision tower before the stream: its gradient is whole."""
        return ReplicatedOffStream()

    def whole(self, module: nn.Module, input_name: str = "hidden_states") -> Plan:
        """Run `module` on every rank, on the whole sequence: what can't be split."""
        inside = self.each_of(module, "", self.replicated_off_stream())
        return inside | {"": Whole(stream=self.stream, input_name=input_name)}

    def end_of_stream(self) -> ParallelStyle:
        """Replicate the final norm, and end the stream at its entry."""
        return EndOfStream(stream=self.stream)

    def vocab_embedding(self, *, begins_stream: bool = False) -> ParallelStyle:
        """Shard the rows of the embedding. See `VocabEmbedding` for where the stream begins."""
        return VocabEmbedding(stream=self.stream, begins_stream=begins_stream)

    def vocab_head(self) -> ParallelStyle:
        """Shard the vocabulary of the head; `loss_parallel` decides what becomes of the logits."""
        return VocabHead(stream=self.stream, loss_parallel=self.options.loss_parallel)

    def each_of(self, model: nn.Module, name: str, style: ParallelStyle) -> Plan:
        """Give `style` to each module at or below `model`'s module `name` that holds parameters."""
        modules = model.get_submodule(name).named_modules(prefix=name)
        return {path: style for path, module in modules if module._parameters}

    # Putting the parts together.

    def plan_of(self, mixer: nn.Module) -> "TPPlan":
        """Return the plan that splits `mixer`: this one, unless its class belongs to another.

        A plan that is registered for no mixer, and has an `attn_plan`, speaks for all of its mixers.
        """
        owner, mine = plan_for_mixer(mixer), mixer_plan_of(type(self))
        speaks_for_all = mine is None and type(self).attn_plan is not TPPlan.attn_plan
        if owner is None or owner is mine or speaks_for_all:
            return self
        plan = owner(self.options)
        plan.stream = self.stream
        return plan

    def full_plan(self, model: nn.Module) -> Plan:
        """Return the whole plan, by fully qualified module name."""
        plan = prefixed("", self.model_plan(model))
        for block in find_decoder(model).blocks:
            for key, style in prefixed(block.name, self.layer_plan(block.module)).items():
                if key in plan:
                    raise PlanError(f"plan key '{key}' is given by model_plan and by layer_plan: keep one")
                plan[key] = style
        return plan


def _first_count(attn: nn.Module, names: tuple[str, ...]) -> dict[str, int]:
    for holder in (attn, getattr(attn, "config", None)):
        for name in names:
            if isinstance(count := getattr(holder, name, None), int):
                return {name: count}
    return {}


def prefixed(name: str, plan: Mapping[str, ParallelStyle]) -> Plan:
    """Return `plan` with its keys relative to the parent of the module `name`.

    Raises:
        PlanError: `plan` is no mapping.
    """
    if not isinstance(plan, Mapping):
        raise PlanError(
            f"the plan of {name} is {plan!r}, not a dict of names and styles: does its method return one?"
        )
    return {join(name, key): style for key, style in plan.items()}
