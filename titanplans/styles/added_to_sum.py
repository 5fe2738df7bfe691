"""`added_to_sum()`: a parameter that every rank adds before an all-reduce, such as experts' biases."""

from torch import nn
from torch.distributed.tensor import Partial, Replicate

from titanplans.split.layout import Layout
from titanplans.styles.base import ParameterStyle, SplitOver


class AddedToSum(ParameterStyle):
    """Replicate a parameter that every rank adds to its partial sum; each rank adds it divided by the degree.

    forward   y_BLD = partial + b_D / degree; the region's exit reduces y
    backward  db_D is partial
    """

    is_inside_region = True

    def layout(self, name: str, param: nn.Parameter, over: SplitOver) -> Layout | None:
        return Layout(Replicate(), Partial(), divided_by=over.degree)
