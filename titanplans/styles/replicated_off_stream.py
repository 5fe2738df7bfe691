"""`replicated_off_stream()`: a module that does the same work on every rank, such as a vision tower before the stream."""

from torch import nn
from torch.distributed.tensor import Replicate

from titanplans.split.layout import Layout
from titanplans.styles.base import ParameterStyle, SplitOver


class ReplicatedOffStream(ParameterStyle):
    """Replicate a module that every rank calls with the same input, off the residual stream.

        forward   y = module(x), x replicated: nothing is sent
        backward  dw is the same on every rank, and is not summed

    For a module that prepares the embeddings, such as a vision tower, and for the modules inside a module with `unsplit()`.
    """

    def layout(self, name: str, param: nn.Parameter, over: SplitOver) -> Layout | None:
        return Layout(Replicate(), Replicate())
