"""Mutants that change nothing, and why. These must pass the proof, and no other mutant may pass."""

import re
from collections.abc import Callable
from dataclasses import dataclass

from tests.support.mutants import operators
from tests.support.mutants.corpus import LOCAL_ATTRIBUTES, Mutant


@dataclass(frozen=True)
class Equivalence:
    """A group of mutants, given by operator, key, options and architectures, and why they are equivalent to the plan."""

    operator: str
    key: str
    """A regular expression that matches the full key."""

    reason: str
    sequence_parallel: bool | None = None
    """True: only with sequence parallelism. False: only without. None: both."""

    architectures: str = ".*"
    """A regular expression that matches the full name."""

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
        "every MLP is called with a positional input, so the name of the input is not used",
    ),
    Equivalence(
        _name(operators.begin_elsewhere),
        r"model\.embeddings",
        "FLA's models compute nothing from the embeddings before the first block, so the stream may begin after them: "
        "replicated embeddings cost an all-reduce instead of a reduce-scatter",
        sequence_parallel=True,
        architectures="transformer|gla",
    ),
    Equivalence(
        _name(operators.replicate),
        r"model\.embed.*|lm_head",
        "every rank holds the full vocabulary and does all of the work; on a replicated stream it has the full gradient",
        sequence_parallel=False,
        architectures="transformer|llama",  # the others have tied weights, for which the mutant is refused
    ),
    Equivalence(
        _name(operators.as_before_stream),
        r"(?!.*attn\.).*(norm|res_proj)",
        "on a replicated stream every rank has the full gradient, as before the stream",
        sequence_parallel=False,
    ),
    Equivalence(
        _name(operators.as_on_stream),
        r".*\.(q_norm|k_norm|g_norm_swish_gate|gk_proj\.0)",
        "in a region each rank has used a part of the activations, as on a sharded stream, so the gradient is Partial",
        sequence_parallel=True,
    ),
    Equivalence(
        _name(operators.as_on_stream),
        r"model\.(vision_tower|multi_modal_projector).*",
        "before the stream every rank has the full gradient, as on a replicated stream",
        sequence_parallel=False,
    ),
    Equivalence(
        LOCAL_ATTRIBUTES,
        r".*\.(attn|self_attn)",
        "these attention functions derive from their tensors how many queries share a key",
        architectures="transformer|qwen2|qwen3",
    ),
)


def equivalence(mutant: Mutant) -> Equivalence | None:
    """Return the group that covers `mutant`; None if the mutant computes something else."""
    return next((row for row in EQUIVALENT if row.covers(mutant)), None)
