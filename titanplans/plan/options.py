"""`TPOptions`: the options of a plan. A plan honours each of them, or raises an error."""

from dataclasses import dataclass
from typing import Literal

from titanplans.plan.degrees import Degrees
from titanplans.split.converted import Recipe
from titanplans.split.layout import StreamLayout


@dataclass(frozen=True)
class TPOptions:
    """The options of a plan. A plan honours each of them, or raises an error."""

    degrees: Degrees

    loss_parallel: bool = True
    """The logits stay sharded over the vocabulary, for a loss that works on shards."""

    sequence_parallel: bool = True
    """Between regions, each rank holds its shard of the sequence."""

    sequence_dim: int = 1
    """The sequence dimension of the hidden states: 1 in [batch, sequence, hidden]."""

    float8: Recipe | Literal["none"] = "none"
    """The recipe with which the model's Linear modules were converted to float8."""

    @property
    def stream(self) -> StreamLayout:
        """The layout of the residual stream between regions."""
        return StreamLayout(self.sequence_dim, self.sequence_parallel and not self.has_all_weights)

    @property
    def has_all_weights(self) -> bool:
        """Whether each rank has all weights except those of experts: only tokens and experts are split."""
        return self.degrees.tp == 1 and max(self.degrees.cp, self.degrees.ep) > 1

    @property
    def shards(self) -> int:
        """Number of ranks that a sequence is sharded over between regions; in training it has to divide the length."""
        return (self.degrees.tp if self.stream.sharded else 1) * self.degrees.cp

    @property
    def shards_tokens(self) -> bool:
        """Whether tokens are sharded between regions, by sequence or context parallelism."""
        return self.sequence_parallel or self.degrees.cp > 1

    def name_degree(self, degree: int) -> str:
        """Return the option and value that an error shows for `degree`, which is tp or tp x cp."""
        tp, cp = self.degrees.tp, self.degrees.cp
        if degree == tp:
            return f"tensor_parallel_degree = {tp}"
        if tp == 1:
            return f"context_parallel_degree = {cp}"
        return f"tensor_parallel_degree x context_parallel_degree = {tp} x {cp}"
