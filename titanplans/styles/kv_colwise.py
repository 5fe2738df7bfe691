"""`kv_colwise()`: a projection to keys or values; ranks share heads if there are fewer heads than ranks."""

from collections.abc import Mapping

from torch import nn
from torch.distributed.tensor import Partial, Replicate

from titanplans.split.layout import Layout, SharedHeads, rows_of
from titanplans.styles.base import Operands, SplitOver
from titanplans.styles.colwise import Colwise


class KVColwise(Colwise):
    """Shard by key/value heads; if there are fewer heads than ranks, neighbouring ranks share a head.

        forward   as colwise(); shared heads: W is replicated, and each rank multiplies by the rows of its head
        backward  as colwise(); shared heads: dW is partial, since each rank's backward covers only its queries

    Args:
        heads: number of heads in the first dimension of each parameter.
    """

    shares_heads = True
    ignores_sections = False
    listed_as = "ranks may share heads of"

    def __init__(self, *, heads: int):
        super().__init__()
        self.heads = heads

    def layout(self, name: str, param: nn.Parameter, over: SplitOver) -> Layout | None:
        if over.degree <= self.heads:
            return super().layout(name, param, over)
        rows = rows_of(0, [SharedHeads(param.shape[0], self.heads)], over.degree)
        return Layout(Replicate(), Partial(), rows=rows)

    def sizes(self) -> Mapping[str, tuple[int, bool]]:
        return {"its head count": (self.heads, True)}

    def operands(self, degree: int) -> Operands | None:
        return Operands(outputs=True, replicas=max(1, degree // self.heads))
