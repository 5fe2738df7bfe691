"""`packed()`: one weight of several sections, such as queries, keys and values, or gate and up."""

from collections.abc import Mapping

from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard

from titanplans.split.converted import is_float8
from titanplans.split.layout import Layout, Section, SharedHeads, rows_of
from titanplans.styles.base import SplitOver, direct_parameters
from titanplans.styles.colwise import Colwise


class Packed(Colwise):
    """Shard each section of a packed projection's outputs.

        forward   W is stored sharded by columns; an all-to-all gives each rank its rows; then as colwise()
        backward  dW: the same all-to-all in reverse

    A checkpoint therefore holds the weight's rows in the order of the unsplit model. Each rank stores an even shard of the
    columns (of the largest other dimension), and sends and receives as much as it stores. A parameter without another
    dimension that the degree divides, such as a bias, is replicated. So is a depthwise convolution's kernel [channels, 1,
    size]: it is small, and fused kernels use it without calling its module.

    Args:
        sections: the number of rows of each section, in order. An int is split evenly over the ranks, though the last rank
            may have fewer rows; a `SharedHeads` is split by heads, which ranks may share.
        dim: as for `colwise()`.
    """

    ignores_sections = False
    listed_as = "packed"

    def __init__(self, *sections: Section, dim: int = 0):
        super().__init__(dim=dim)
        self.sections = sections

    @property
    def shares_heads(self) -> bool:  # type: ignore[override]
        return any(isinstance(section, SharedHeads) for section in self.sections)

    def layout(self, name: str, param: nn.Parameter, over: SplitOver) -> Layout | None:
        dim = min(self.dim, param.ndim - 1)
        rows = rows_of(dim, self.sections, over.degree)
        others = [d for d in range(param.ndim) if d != dim and param.shape[d] % over.degree == 0]
        depthwise = dim == 0 and param.ndim > 2 and param.shape[1] == 1
        if not others or depthwise:
            return Layout(Replicate(), Partial(), rows=rows)
        # Of equally large dimensions, take the last: the first is the expert dimension, along which FSDP2 shards.
        stored = max(reversed(others), key=lambda d: param.shape[d])
        return Layout(Shard(stored), Shard(stored), rows=rows)

    def sizes(self) -> Mapping[str, tuple[int, bool]]:
        numbered = enumerate(self.sections, start=1)
        return {
            f"section {number} of its rows": (section, False)
            if isinstance(section, int)
            else (section.heads, True)
            for number, section in numbered
        }

    def refusal(self, module: nn.Module, over: SplitOver) -> str | None:
        if is_float8(module):
            has_shared_heads = any(not isinstance(s, int) and s.heads < over.degree for s in self.sections)
            if has_shared_heads or module.config.enable_fsdp_float8_all_gather:  # type: ignore[union-attr]
                reason = "ranks share its heads" if has_shared_heads else "it is gathered in float8"
                return f"in float8 a packed projection can't be split if {reason}: exclude it from float8 (filter it)"
        return next(
            filter(
                None,
                map(self.parameter_refusal, direct_parameters(module), direct_parameters(module).values()),
            ),
            None,
        )

    def parameter_refusal(self, name: str, param: nn.Parameter) -> str | None:
        dim = min(self.dim, param.ndim - 1)
        rows = sum(section if isinstance(section, int) else section.size for section in self.sections)
        if param.shape[dim] == rows:
            return None
        return (
            f"its sections {self.sections} add up to {rows}, but dimension {dim} of {name} is {param.shape[dim]}: give "
            "packed() the rows of each section, in order"
        )
