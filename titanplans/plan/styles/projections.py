"""Styles of a product, split by its outputs, by sections of them, or by its inputs."""

from collections.abc import Mapping, Sequence

from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard

from titanplans.plan.converted import is_float8
from titanplans.plan.layout import Layout, Section, Shared, StreamLayout, rows_of
from titanplans.plan.styles.base import ParameterStyle, Style, held


class Colwise(ParameterStyle):
    """Split by outputs: a Linear's weight [outputs, inputs], a depthwise convolution's channels, numbers by head.

    Args:
        dim: the parameters' dimension that is split: 0, the outputs of a Linear. Of a parameter with fewer dimensions,
            such as the bias of a transposed weight, the last.
        interleaved: a packed projection whose sections alternate head by head, so that even shards are right.
    """

    inside = splits = True
    remedy = "rowwise() is for a projection that gets a part of its inputs"

    def __init__(self, *, dim: int = 0, interleaved: bool = False):
        self.dim, self.interleaved = dim, interleaved

    def layout(self, name: str, param: nn.Parameter) -> Layout | None:
        dim = min(self.dim, param.ndim - 1)
        return Layout(Shard(dim), Shard(dim))


class KVColwise(Colwise):
    """Split by key/value heads; where there are fewer of them than ranks, neighbouring ranks share one.

    A parameter whose heads are shared is replicated, and reading it gives the rows of this rank's
    head. Each of the ranks that share it has seen some of its queries only, so the gradient is a sum.

    Args:
        heads: how many heads the first dimension of each parameter counts.
        degree: number of ranks.
    """

    shares_heads = True

    def __init__(self, *, heads: int, degree: int):
        super().__init__()
        self.heads, self.degree = heads, degree

    def layout(self, name: str, param: nn.Parameter) -> Layout | None:
        if self.degree <= self.heads:
            return super().layout(name, param)
        shared = rows_of(0, [Shared(param.shape[0], self.heads)], self.degree)
        return Layout(Replicate(), Partial(), rows=shared)

    def sizes(self) -> Mapping[str, tuple[int, bool]]:
        return {"the number of its heads": (self.heads, True)}


class Packed(Colwise):
    """Split each section of a packed projection's outputs: queries, keys and values in one weight, or gate and up.

    A weight keeps its true rows in their true order: each rank stores an even share of its columns (of its largest
    other dimension), and reading it is an all-to-all, in which a rank gives and gets as much as it stores. A parameter
    without another dimension that the degree divides, such as a bias, is replicated, and so is a depthwise convolution's
    kernel [channels, 1, size], which is small, and which fused kernels read without calling its module.

    Args:
        sections: rows of each section, in order; a number is split evenly, but that the last rank may have fewer, a `Shared`
            by heads that ranks may share.
        degree: number of ranks.
        dim: as for `Colwise`.
    """

    def __init__(self, *, sections: Sequence[Section], degree: int, dim: int = 0):
        super().__init__(dim=dim)
        self.sections, self.degree = tuple(sections), degree

    @property
    def shares_heads(self) -> bool:  # type: ignore[override]
        return any(isinstance(section, Shared) for section in self.sections)

    @property
    def size(self) -> int:
        """Rows of all sections."""
        return sum(section if isinstance(section, int) else section.size for section in self.sections)

    def layout(self, name: str, param: nn.Parameter) -> Layout | None:
        dim = min(self.dim, param.ndim - 1)
        rows = rows_of(dim, self.sections, self.degree)
        others = [d for d in range(param.ndim) if d != dim and param.shape[d] % self.degree == 0]
        depthwise = dim == 0 and param.ndim > 2 and param.shape[1] == 1
        if not others or depthwise:
            return Layout(Replicate(), Partial(), rows=rows)
        # The first of the largest would be the experts, by which FSDP2 shards.
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

    def refusal(self, module: nn.Module) -> str | None:
        if is_float8(module):
            fewer = any(not isinstance(s, int) and s.heads < self.degree for s in self.sections)
            if fewer or module.config.enable_fsdp_float8_all_gather:  # type: ignore[union-attr]
                what = "ranks share heads of it" if fewer else "it is gathered in float8"
                return f"in float8 a packed projection is not split where {what}: leave it out of float8 (filter it)"
        return next(filter(None, map(self._misfit, held(module), held(module).values())), None)

    def parameter_refusal(self, name: str, param: nn.Parameter) -> str | None:
        return self._misfit(name, param)

    def _misfit(self, name: str, param: nn.Parameter) -> str | None:
        dim = min(self.dim, param.ndim - 1)
        if param.shape[dim] == self.size:
            return None
        return (
            f"its sections {self.sections} add up to {self.size}, but dimension {dim} of {name} is {param.shape[dim]}: give "
            "packed() the rows of each section, in order"
        )


class Rowwise(Style):
    """Split a Linear by its inputs; its output [..., sequence, outputs] is a part of a sum.

    A bias is replicated and added after the sum, as the unsharded Linear does. Where the sum is elsewhere, or the module is
    no Linear and can't do without, each rank adds its part of it.

    Args:
        stream: how the residual stream lies.
        reduce_output: leave the region here. False where a parent does, because it calls a fused
            kernel on this weight or works on the output before it returns.
        degree: number of ranks.
        dim: the weight's dimension that is split: 1, the inputs of a Linear's weight [outputs, inputs].
    """

    inside = splits = True
    remedy = "colwise() is for a projection that gets all of its inputs"

    def __init__(self, *, stream: StreamLayout, reduce_output: bool, degree: int, dim: int = 1):
        self.stream, self.reduce_output, self.degree, self.dim = stream, reduce_output, degree, dim

    @property
    def closes(self) -> bool:  # type: ignore[override]
        return self.reduce_output

    def layout(self, name: str, param: nn.Parameter) -> Layout | None:
        if name != "bias":
            return Layout(Shard(self.dim), Shard(self.dim))
        if self.reduce_output and self.dim == 1:
            return Layout(Replicate(), self.stream.gradient, deferred=True)
        return Layout(Replicate(), Partial(), divided_by=self.degree)

    def parameter_refusal(self, name: str, param: nn.Parameter) -> str | None:
        return "a parameter sums nothing: rowwise(reduce_output=False)" if self.reduce_output else None


class RowwiseInRegion(Style):
    """Split a Linear inside a region by its inputs, and give every rank its whole output; the region goes on.

    For a small projection that every rank needs whole: Mamba's `x_proj`. A key may name the weight alone where a
    mixer's own code multiplies by it, and `TPPlan.local_functions` gives that code the sum: `self.summed`.
    """

    inside = splits = True

    def layout(self, name: str, param: nn.Parameter) -> Layout | None:
        return Layout(Replicate(), Partial(), deferred=True) if name == "bias" else Layout(Shard(1), Shard(1))

    def parameter_refusal(self, name: str, param: nn.Parameter) -> str | None:
        return "it is no weight [outputs, inputs]: replicated_in_region()" if param.ndim != 2 else None
