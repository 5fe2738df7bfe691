"""Mutants that change nothing, and why: these must survive, and no others may."""

import re
from collections.abc import Callable
from dataclasses import dataclass

from tests.support.mutants import operators
from tests.support.mutants.corpus import LOCAL_ATTRIBUTES, Mutant


@dataclass(frozen=True)
class Equivalence:
    """Mutants, given by operator, key, kind of style and options, and why they are equivalent."""

    operator: str
    key: str
    """A regular expression for the whole key."""

    reason: str
    sequence_parallel: bool | None = None
    """Only with the sequence sharded, or only whole; None for both."""

    architectures: str = ".*"
    """A regular expression for the whole name."""

    def covers(self, mutant: Mutant) -> bool:
        return (
            self.operator == mutant.operator
            and re.fullmatch(self.key, mutant.key) is not None
            and re.fullmatch(self.architectures, mutant.architecture.name) is not None
            and self.sequence_parallel in (None, mutant.options.sequence_parallel)
        )


def _name(operator: Callable) -> str:
    return operator.__name__


EQUIVALENT = (
    Equivalence(
        _name(operators.other_loss),
        "lm_head",
        "the logits are gathered before the loss instead of reduced in it: the same loss of the same logits",
    ),
    Equivalence(
        _name(operators.other_input_name),
        r".*\.mlp",
        "every MLP is called with a positional input, of which the name is not asked",
    ),
    Equivalence(
        _name(operators.begin_elsewhere),
        r"model\.embeddings",
        "FLA's models draw no conclusion from embeddings, so that the stream may begin after them: whole embeddings "
        "cost an all-reduce instead of a reduce-scatter",
        sequence_parallel=True,
        architectures="transformer|gla",
    ),
    Equivalence(
        _name(operators.whole),
        r"model\.embed.*|lm_head",
        "every rank holds the whole vocabulary and does all of the work; on a whole stream it has the whole gradient",
        sequence_parallel=False,
        architectures="transformer|llama",  # the others' are tied, which is refused
    ),
    Equivalence(
        _name(operators.as_before_stream),
        r"(?!.*attn\.).*(norm|res_proj)",
        "on a whole stream as before it: a whole gradient on every rank",
        sequence_parallel=False,
    ),
    Equivalence(
        _name(operators.as_on_stream),
        r".*\.(q_norm|k_norm|g_norm_swish_gate|gk_proj\.0)",
        "on a sharded stream as in a region: each rank has seen a share, and the gradient is Partial",
        sequence_parallel=True,
    ),
    Equivalence(
        _name(operators.as_on_stream),
        r"model\.(vision_tower|multi_modal_projector).*",
        "on a whole stream as before it: a whole gradient on every rank",
        sequence_parallel=False,
    ),
    Equivalence(
        LOCAL_ATTRIBUTES,
        r".*\.(attn|self_attn)",
        "these attention functions read off their tensors how many queries share a key",
        architectures="transformer|qwen2|qwen3",
    ),
)


def equivalence(mutant: Mutant) -> Equivalence | None:
    """Return the row that covers `mutant`; None if it changes the mathematics."""
    return next((row for row in EQUIVALENT if row.covers(mutant)), None)
