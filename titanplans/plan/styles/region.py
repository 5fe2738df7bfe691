"""The style of a region: the part of a block between the gather of the sequence and the sum of the ranks' outputs."""

from collections.abc import Mapping
from typing import Any

from titanplans.plan.styles.base import Style


class Region(Style):
    """A region: the sequence is gathered once at its entry, before all projections.

    Args:
        reduce_output: also reduce at the module's exit: its output [..., sequence, hidden], or the first of a tuple.
            Otherwise a `Rowwise` inside has to.
        input_name: keyword under which the input [..., sequence, hidden] comes if it is not the first positional argument.
        float8_input: only the projections inside read the input, so that in a model converted to float8 it may
            come in float8. Where a mask says which tokens count it does not: the module may leave the others out first.
        mixes_tokens: a mixer, or an MLP that shifts tokens: context parallelism gives its code the whole sequence. False: an
            MLP or a mixture of experts, which works token by token on those of a rank.
        shared: other regions read the output, such as keys and values for several blocks; nothing leaves.
        arguments: given to the module whatever its caller gives, for a path of its code that can be split.
    """

    opens = gathers = True
    remedy = (
        "its own code works on this rank's heads or width: local_attributes and mlp_attributes set its counts, colwise() "
        "splits its own parameters; where it goes on after a rowwise(), leave the sum to its exit: "
        "rowwise(reduce_output=False) in attn_region() or mlp_region()"
    )

    def __init__(
        self,
        *,
        reduce_output: bool,
        input_name: str = "hidden_states",
        float8_input: bool = True,
        mixes_tokens: bool = True,
        shared: bool = False,
        arguments: Mapping[str, Any] | None = None,
    ):
        self.reduce_output, self.input_name = reduce_output, input_name
        self.float8_input, self.mixes_tokens = float8_input, mixes_tokens
        self.shared, self.arguments = shared, arguments or {}

    @property
    def closes(self) -> bool:  # type: ignore[override]
        return self.reduce_output
