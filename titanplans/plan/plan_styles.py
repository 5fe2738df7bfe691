"""The styles that plans are made of, by the names that a plan calls them: `self.colwise()` and the like.

The declarations are in `plan.styles`; this gives them the plan's options.
"""

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from titanplans.plan.layout import Section, Shared, rows_of
from titanplans.plan.options import TPOptions
from titanplans.plan.styles.experts import ByExpert
from titanplans.plan.styles.norms import GatheredInRegion, SplitNorm, Statistic
from titanplans.plan.styles.projections import Colwise, Packed, Rowwise, RowwiseInRegion
from titanplans.plan.styles.region import Region
from titanplans.plan.styles.replicated import (
    AddedToSum,
    EndOfStream,
    ReplicatedInRegion,
    ReplicatedOffStream,
    ReplicatedOnStream,
    Whole,
)
from titanplans.plan.styles.vocab import VocabEmbedding, VocabHead

Plan = dict[str, ParallelStyle]


class PlanStyles:
    """The styles of one plan."""

    options: TPOptions

    def attn_input(self, input_name: str = "hidden_states", *, float8_input: bool = True) -> Plan:
        """Gather the sequence once, before all projections of a mixer; a `rowwise` inside reduces."""
        return self._region(input_name, False, float8_input)

    def attn_region(
        self,
        input_name: str = "hidden_states",
        *,
        float8_input: bool = True,
        arguments: Mapping[str, Any] | None = None,
    ) -> Plan:
        """Gather at a mixer's entry and reduce at its exit; its `rowwise` has `reduce_output=False`.

        `arguments` are given to the mixer whatever its caller gives, for a path of its code that can be split.
        """
        return self._region(input_name, True, float8_input, arguments)

    def mlp_input(self, input_name: str = "x", *, float8_input: bool = True) -> Plan:
        """Gather the sequence once, before gate and up; the module works token by token."""
        return self._region(input_name, False, float8_input, mixes_tokens=False)

    def mlp_region(self, input_name: str = "x", *, float8_input: bool = True) -> Plan:
        """Gather at the entry of an MLP, or of a mixture of experts under any name, and reduce at its exit.

        For code that goes on behind its products, or reads their weights. The module works token by token; one that mixes
        tokens, as RWKV's shift does, takes `attn_region`.
        """
        return self._region(input_name, True, float8_input, mixes_tokens=False)

    def shared_region(self, input_name: str = "hidden_states", *, float8_input: bool = True) -> Plan:
        """Gather at the entry of a module whose output other regions read: keys and values for several blocks."""
        given = {"input_name": input_name, "float8_input": float8_input}
        return {"": Region(reduce_output=False, shared=True, **given)}  # type: ignore[arg-type]

    def _region(
        self,
        input_name: str,
        reduce_output: bool,
        float8_input: bool,
        arguments: Mapping[str, Any] | None = None,
        mixes_tokens: bool = True,
    ) -> Plan:
        region = Region(
            reduce_output=reduce_output,
            input_name=input_name,
            float8_input=float8_input,
            mixes_tokens=mixes_tokens,
            arguments=arguments,
        )
        return {"": region}

    def colwise(self, *, dim: int = 0, interleaved: bool = False) -> ParallelStyle:
        """Shard a module's outputs or channels, or one parameter by heads: dimension `dim`.

        `interleaved`: a packed projection in which each head's queries, keys and values follow each other.
        """
        return Colwise(dim=dim, interleaved=interleaved)

    def packed(self, *sections: Section, dim: int = 0) -> ParallelStyle:
        """Shard each section of a packed projection: so many rows in even shares, or `self.shared(rows, heads)`."""
        return Packed(sections=sections, degree=self.options.degree, dim=dim)

    def shared(self, rows: int, heads: int = 1) -> Section:
        """Return a section of `packed` whose heads ranks share where there are too few; one head is read by all."""
        return Shared(rows, heads)

    def by_expert(self) -> ParallelStyle:
        """Give each rank of expert parallelism some of a module's experts, whole. See `ByExpert`."""
        return ByExpert()

    def rowwise(self, *, reduce_output: bool = True, dim: int = 1) -> ParallelStyle:
        """Shard a Linear's inputs, dimension `dim` of its weight, and sum its output over the ranks."""
        return Rowwise(
            stream=self.options.stream, reduce_output=reduce_output, degree=self.options.degree, dim=dim
        )

    def rowwise_in_region(self) -> ParallelStyle:
        """Shard a Linear's inputs, and give every rank the sum: the region goes on behind it."""
        return RowwiseInRegion()

    def split_norm(
        self,
        *,
        heads: int | None = None,
        rows: int = 0,
        statistic: Statistic | None = None,
        groups: int = 1,
    ) -> ParallelStyle:
        """Shard the width of a norm, and average its mean square over the ranks.

        Args:
            heads: that the width counts, where ranks may share them, and `rows`, their width.
            statistic, groups: see `SplitNorm`.
        """
        shared = heads is not None and heads < self.options.degree
        own = rows_of(0, [Shared(rows, heads)], self.options.degree) if shared else None  # type: ignore[arg-type]
        return SplitNorm(rows=own, statistic=statistic, groups=groups)

    def gathered_in_region(self, *, dim: int = -1) -> ParallelStyle:
        """Run a module inside a region on the whole width, gathered in `dim`, and keep this rank's part of its output."""
        return GatheredInRegion(dim=dim)

    def replicated_in_region(self) -> ParallelStyle:
        """Replicate a module inside a region, such as a norm over each head: its gradient is a sum over the ranks."""
        return ReplicatedInRegion()

    def added_to_sum(self) -> ParallelStyle:
        """Replicate a parameter that is added to a sum over the ranks, such as experts' biases: each rank adds its part."""
        return AddedToSum(degree=self.options.degree)

    def replicated_on_stream(self) -> ParallelStyle:
        """Replicate a module on the residual stream, such as a block's norm: it works token by token."""
        return ReplicatedOnStream(stream=self.options.stream)

    def replicated_off_stream(self) -> ParallelStyle:
        """Replicate what does the same on every rank, such as a vision tower before the stream: its gradient is whole."""
        return ReplicatedOffStream()

    def whole(self, module: nn.Module, input_name: str = "hidden_states") -> Plan:
        """Run `module` on every rank, on the whole sequence: what can't be split."""
        inside = self.each_of(module, "", self.replicated_off_stream())
        return inside | {"": Whole(input_name=input_name)}

    def end_of_stream(self) -> ParallelStyle:
        """Replicate the final norm, and end the stream at its entry."""
        return EndOfStream()

    def vocab_embedding(self, *, begins_stream: bool = False) -> ParallelStyle:
        """Shard the rows of the embedding. See `VocabEmbedding` for where the stream begins."""
        return VocabEmbedding(begins_stream=begins_stream)

    def vocab_head(self) -> ParallelStyle:
        """Shard the vocabulary of the head; `loss_parallel` decides what becomes of the logits."""
        return VocabHead(loss_parallel=self.options.loss_parallel)

    def each_of(self, model: nn.Module, name: str, style: ParallelStyle) -> Plan:
        """Give `style` to each module at or below `model`'s module `name` that holds parameters."""
        modules = model.get_submodule(name).named_modules(prefix=name)
        return {path: style for path, module in modules if module._parameters}
