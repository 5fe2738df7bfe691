"""What a plan has to honour or refuse: the degree of each way to cut, and whether the stream and the logits are sharded."""

from dataclasses import dataclass
from typing import Literal

from titanplans.plan.degrees import Degrees
from titanplans.split.converted import Recipe
from titanplans.split.layout import StreamLayout


@dataclass(frozen=True)
class TPOptions:
    """What a plan has to honour or refuse."""

    degrees: Degrees

    loss_parallel: bool = True
    """The logits stay sharded over the vocabulary, for a loss that works on shards."""

    sequence_parallel: bool = True
    """Between regions, each rank holds its shard of the sequence."""

    sequence_dim: int = 1
    """Dimension of the hidden states that is the sequence: 1 in [batch, sequence, hidden]."""

    float8: Recipe | Literal["none"] = "none"
    """The recipe by which the model's Linear modules were converted to float8."""

    @property
    def stream(self) -> StreamLayout:
        """How the residual stream lies between regions."""
        return StreamLayout(self.sequence_dim, self.sequence_parallel and not self.keeps_weights)

    @property
    def keeps_weights(self) -> bool:
        """Whether each rank has all weights, but those of experts: nothing is cut but tokens and experts."""
        return self.degrees.tp == 1 and max(self.degrees.cp, self.degrees.ep) > 1

    @property
    def shards(self) -> int:
        """How many ranks share a sequence between regions; in training they divide its length."""
        return (self.degrees.tp if self.stream.sharded else 1) * self.degrees.cp

    @property
    def cuts_stream(self) -> bool:
        """Whether a rank has a part of the tokens between regions."""
        return self.sequence_parallel or self.degrees.cp > 1

    def name_degree(self, degree: int) -> str:
        """Return how an error names `degree`, that of tensor parallelism or of all ranks that heads are split over."""
        tp, cp = self.degrees.tp, self.degrees.cp
        if degree == tp:
            return f"tensor_parallel_degree = {tp}"
        if tp == 1:
            return f"context_parallel_degree = {cp}"
        return f"tensor_parallel_degree x context_parallel_degree = {tp} x {cp}"
