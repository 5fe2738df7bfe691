"""Styles that replicate parameters; they differ in the placement of the gradient: Partial, Replicate, or the stream's."""

from torch import nn
from torch.distributed.tensor import Partial, Replicate

from titanplans.plan.converted import is_float8
from titanplans.plan.layout import Layout, StreamLayout
from titanplans.plan.styles.base import ParameterStyle, Style


class ReplicatedInRegion(ParameterStyle):
    """Replicate a module's parameters inside a region: their gradient is Partial.

    For modules between the region's entry and its `Rowwise`, such as a norm over each head. A module that
    works on the sum, after the `Rowwise`, is on the stream again: `ReplicatedOnStream`.
    """

    inside = True
    remedy = "a norm over a width that is split is split_norm() or gathered_in_region()"

    def layout(self, name: str, param: nn.Parameter) -> Layout | None:
        return Layout(Replicate(), Partial())


class AddedToSum(ParameterStyle):
    """Replicate what every rank adds before the all-reduce, such as experts' biases: each reads it divided by
    `degree`, the number of ranks.
    """

    inside = True

    def __init__(self, *, degree: int):
        self.degree = degree

    def layout(self, name: str, param: nn.Parameter) -> Layout | None:
        return Layout(Replicate(), Partial(), divided_by=self.degree)


class ReplicatedOnStream(ParameterStyle):
    """Replicate a module's parameters on the residual stream [..., sequence, hidden], where it works token by token."""

    def __init__(self, *, stream: StreamLayout):
        self.stream = stream

    def layout(self, name: str, param: nn.Parameter) -> Layout | None:
        return Layout(Replicate(), self.stream.gradient)

    def refusal(self, module: nn.Module) -> str | None:
        if is_float8(module) and self.stream.dim is not None:
            return (
                "in float8 a rank would scale its shard of the sequence as if it were all of it: leave the module out of "
                "float8 (filter it), or set sequence_parallel = False"
            )
        return None


class ReplicatedOffStream(ParameterStyle):
    """Replicate a module that every rank calls with the same input, off the residual stream.

    For a module that prepares the embeddings, such as a vision tower, and for one in a `Whole` module: the work and its
    gradients are the same on every rank.
    """

    def layout(self, name: str, param: nn.Parameter) -> Layout | None:
        return Layout(Replicate(), Replicate())


class Whole(ReplicatedOffStream):
    """Run a module whole on every rank, off the stream: a mixer that can't be split by heads.

    Its input is the whole sequence, and its output is laid out as the stream again. Under sequence parallelism that
    takes an all-gather in the forward and one in the backward, and no reduction.

    Args:
        input_name: keyword under which the input comes if it is not the first positional argument.
    """

    gathers = True

    def __init__(self, *, input_name: str = "hidden_states"):
        self.input_name = input_name

    def parameter_refusal(self, name: str, param: nn.Parameter) -> str | None:
        return Style.parameter_refusal(self, name, param)


class EndOfStream(ReplicatedOffStream):
    """Replicate the module at whose entry the stream ends; it and all behind it see the whole sequence.

    For a final norm whose output the model's code views by the shape of the token ids.
    """

    def parameter_refusal(self, name: str, param: nn.Parameter) -> str | None:
        return Style.parameter_refusal(self, name, param)
