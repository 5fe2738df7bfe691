"""The styles as methods of a plan, such as `self.colwise()`.

Each style is a class in `titanplans/styles/`; a style that depends on the plan's options is a method here.
"""

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from titanplans.plan.options import TPOptions
from titanplans.split.layout import SharedHeads
from titanplans.styles.added_to_sum import AddedToSum
from titanplans.styles.by_expert import ByExpert
from titanplans.styles.colwise import Colwise
from titanplans.styles.end_of_stream import EndOfStream
from titanplans.styles.gathered_in_region import GatheredInRegion
from titanplans.styles.packed import Packed
from titanplans.styles.region import Region
from titanplans.styles.replicated_in_region import ReplicatedInRegion
from titanplans.styles.replicated_off_stream import ReplicatedOffStream
from titanplans.styles.replicated_on_stream import ReplicatedOnStream
from titanplans.styles.rowwise import Rowwise
from titanplans.styles.rowwise_in_region import RowwiseInRegion
from titanplans.styles.split_norm import SplitNorm
from titanplans.styles.stream_arguments import StreamArguments
from titanplans.styles.unsplit import Unsplit
from titanplans.styles.vocab_embedding import VocabEmbedding
from titanplans.styles.vocab_head import VocabHead

Plan = dict[str, ParallelStyle]


class PlanStyles:
    """The styles that a plan can use, as its methods."""

    options: TPOptions

    def attn_input(
        self, input_name: str = "hidden_states", *, float8_input: bool = True, may_gather: bool = False
    ) -> Plan:
        """Gather the sequence once, before all projections of a mixer; its `rowwise` projection reduces the output.

        `may_gather`: see `attn_region`.
        """
        return self._region(input_name, False, float8_input, may_gather=may_gather)

    def attn_region(
        self,
        input_name: str = "hidden_states",
        *,
        float8_input: bool = True,
        arguments: Mapping[str, Any] | None = None,
        may_gather: bool = False,
    ) -> Plan:
        """Gather at a mixer's entry and reduce at its exit; its `rowwise` projection needs `reduce_output=False`.

        Args:
            input_name, float8_input: as in `Region`.
            arguments: keyword arguments that override the caller's, to select a code path that can be split.
            may_gather: under context parallelism the mixer's code may gather the hidden states of all tokens, which it
                needs for a token shift, for a convolution over hidden states, or to remove padding by a mask.
        """
        return self._region(input_name, True, float8_input, arguments, may_gather=may_gather)

    def mlp_input(self, input_name: str = "x", *, float8_input: bool = True) -> Plan:
        """Gather the sequence once, before gate and up; the MLP's `rowwise` projection reduces the output.

        The module has to work token by token.
        """
        return self._region(input_name, False, float8_input, mixes_tokens=False)

    def mlp_region(self, input_name: str = "x", *, float8_input: bool = True) -> Plan:
        """Gather at the entry of an MLP or a mixture of experts, whatever its class is called, and reduce at its exit.

        Use it if the module's code works on the output of the last projection, or uses the projections' weights itself.
        The module has to work token by token. A module that mixes tokens, such as RWKV's shift, needs `attn_region`.
        """
        return self._region(input_name, True, float8_input, mixes_tokens=False)

    def shared_region(
        self, input_name: str = "hidden_states", *, float8_input: bool = True, may_gather: bool = False
    ) -> Plan:
        """Gather at the entry of a module whose output only other regions use, such as keys and values for several blocks.

        `may_gather`: see `attn_region`.
        """
        return self._region(input_name, False, float8_input, shared=True, may_gather=may_gather)

    def _region(
        self,
        input_name: str,
        reduce_output: bool,
        float8_input: bool,
        arguments: Mapping[str, Any] | None = None,
        mixes_tokens: bool = True,
        shared: bool = False,
        may_gather: bool = False,
    ) -> Plan:
        region = Region(
            reduce_output=reduce_output,
            input_name=input_name,
            float8_input=float8_input,
            mixes_tokens=mixes_tokens,
            shared=shared,
            arguments=arguments,
            may_gather=may_gather,
        )
        return {"": region}

    # These attributes are classes, so `self.rowwise(reduce_output=False)` makes an instance, which is a style.
    colwise = Colwise
    packed = Packed
    shared_heads = SharedHeads
    by_expert = ByExpert
    rowwise = Rowwise
    rowwise_in_region = RowwiseInRegion
    split_norm = SplitNorm
    gathered_in_region = GatheredInRegion
    replicated_in_region = ReplicatedInRegion
    added_to_sum = AddedToSum
    replicated_on_stream = ReplicatedOnStream
    replicated_off_stream = ReplicatedOffStream
    end_of_stream = EndOfStream
    stream_arguments = StreamArguments
    vocab_embedding = VocabEmbedding

    def vocab_head(self) -> ParallelStyle:
        """Shard the vocabulary of the head; `loss_parallel` decides whether the logits stay sharded."""
        return VocabHead(loss_parallel=self.options.loss_parallel)

    def unsplit(self, module: nn.Module, input_name: str = "hidden_states") -> Plan:
        """Run `module` unsplit on every rank, on the full sequence, because it can't be split."""
        inside = self.each_of(module, "", self.replicated_off_stream())
        return inside | {"": Unsplit(input_name=input_name)}

    def each_of(self, model: nn.Module, name: str, style: ParallelStyle) -> Plan:
        """Give `style` to the module `name` of `model` and to each module inside it, if it has direct parameters."""
        modules = model.get_submodule(name).named_modules(prefix=name)
        return {path: style for path, module in modules if module._parameters}
