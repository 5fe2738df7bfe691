"""The conditions of a batch that the model's own code refuses: a proof leaves them out, and says so.

A signature is not enough: a model may take an `attention_mask`, and assert that there is none in training. Only an error
of its own code is a refusal; one of our kernels or of torch ends the proof.
"""

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from titanplans.errors import UserError, either
from titanplans.loss import FusedLoss, NotFused, cross_entropy
from titanplans.proof.batches.conditions import MicroBatch
from titanplans.proof.batches.sample import Sampler, moved
from titanplans.proof.batches.script import next_token
from titanplans.proof.compare.forward import (
    FAILURES,
    call,
    continued,
    does_not_run,
    evaluate,
    first_line,
    is_ours,
    raised_at,
)
from titanplans.split.cache import CACHES
from titanplans.split.stages.trace import logits_of

_REFUSALS = (AssertionError, NotImplementedError, ValueError)
"""Errors by which code refuses an argument. Any other is a mistake, the model's or ours."""


def leave_out_what_is_refused(model: nn.Module, sampler: Sampler) -> list[str]:
    """Let `sampler` make no batch that `model` refuses; return the conditions left out, with the model's own words.

    A keyword without effect is named, too, and stays in the batches.
    """
    batch, left_out = MicroBatch(2, 4), []
    padded, packed = replace(batch, padding="left"), replace(batch, documents=True)
    if sampler.padded and (reason := _refusal(model, sampler, padded, "an attention_mask in training")):
        sampler.padded = False
        left_out.append(f"padding: {reason}")
    elif sampler.padded and _has_no_effect(model, sampler, padded, "attention_mask"):
        left_out.append("padding: an attention_mask changes nothing in its forward")
    if (documents := sampler.documents) and (reason := _refusal(model, sampler, packed, documents)):
        sampler.documents = None
        left_out.append(f"documents in a sequence: {reason}")
    elif documents and _has_no_effect(model, sampler, packed, documents):
        left_out.append(f"documents in a sequence: {documents} change nothing in its forward")
    reasons = {
        padding: reason
        for padding in sampler.caches
        if (reason := _refusal(model, sampler, replace(batch, padding=padding), "use_cache", cached=True))
    }
    if len(set(reasons.values())) == 1 and len(reasons) == len(sampler.caches):
        left_out.append(f"a forward with a cache: {next(iter(reasons.values()))}")
    else:
        words = {"": "a cache without padding", "left": "padding with a cache"}
        left_out += [f"{words[padding]}: {reason}" for padding, reason in reasons.items()]
    sampler.caches = tuple(padding for padding in sampler.caches if padding not in reasons)
    return left_out


def why_not_fused(model: nn.Module, sampler: Sampler) -> str | None:
    """Return why the head of `model` can't compute its loss; None if it can.

    Raises:
        PlanError: the model does not run.
    """
    model = copy.deepcopy(model).train()
    given = _moved(model, sampler.tokens(MicroBatch(2, 4), 0))
    try:
        with torch.no_grad():
            labels = torch.zeros(logits_of(call(model, given)).shape[:-1], dtype=torch.int64)
            with FusedLoss(model)(labels):
                logits = logits_of(call(model, given))
        cross_entropy(logits, labels, 1)
    except NotFused as error:
        return str(error)
    except FAILURES as error:
        raise does_not_run(model, error, "in its first forward") from error
    return None


def _refusal(
    model: nn.Module, sampler: Sampler, batch: MicroBatch, what: str, *, cached: bool = False
) -> str | None:
    """Return the words in which `model` refuses `what` of `batch`, and the line; None if it takes it.

    Raises:
        PlanError: it fails otherwise.
    """
    model, given = copy.deepcopy(model), sampler.tokens(batch, 0, cached=cached)
    inputs, token = _moved(model, given), _moved(model, next_token(given, sampler))
    try:
        if cached:
            output = evaluate(model, inputs | {"use_cache": True})
            if (continuation := continued(model, token, output)) is None:
                return f"its forward returns none called {either(CACHES)}"
            evaluate(model, continuation)
        else:
            call(model.train(), inputs)
    except FAILURES as error:
        if not isinstance(error, _REFUSALS) or isinstance(error, UserError) or is_ours(error):
            raise does_not_run(model, error, f"with {what}") from error
        return f"its forward refuses {what}: {first_line(error)} ({raised_at(error)})"
    return None


def _has_no_effect(model: nn.Module, sampler: Sampler, batch: MicroBatch, name: str) -> bool:
    """Whether the logits of `batch` are the same to the last bit without the keyword `name`."""
    given = _moved(model, sampler.tokens(batch, 0))
    without = {key: value for key, value in given.items() if key != name}
    found = []
    for inputs in (given, without):
        torch.manual_seed(0)  # of adapters' dropout
        with torch.no_grad():
            found.append(logits_of(call(copy.deepcopy(model).train(), inputs)))
    return torch.equal(*found)


def _moved(model: nn.Module, inputs: dict[str, Any]) -> dict[str, Any]:
    first = next(model.parameters())
    return moved(inputs, first.device, first.dtype)
