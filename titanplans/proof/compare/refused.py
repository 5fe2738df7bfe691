"""Conditions of a batch that the model's own code refuses, which a proof leaves out and reports.

The model is run to find them, since its signature is not enough: a model may take an `attention_mask`, and assert in its
code that there is none in training.
"""

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from titanplans.errors import UserError, either
from titanplans.loss import FusedLoss, NotFused, cross_entropy
from titanplans.plan.plan import Plan
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
from titanplans.split.decoder import find_decoder
from titanplans.split.stages.trace import logits_of
from titanplans.styles.base import Style

_REFUSALS = (AssertionError, NotImplementedError, ValueError)
"""Errors that code raises to refuse an argument. Any other error is a mistake of the model or of this project."""


def leave_out_what_is_refused(model: nn.Module, sampler: Sampler) -> list[str]:
    """Change `sampler` so that no batch has a condition that `model` refuses; return these conditions with the reasons.

    A keyword without effect is also returned, but batches keep it.

    Raises:
        PlanError: the model fails with an error that is not a refusal.
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


def why_not_fused(model: nn.Module, sampler: Sampler, styles: Plan) -> str | None:
    """Return why the head of `model` can't compute its loss, unsplit or with these styles; None if it can.

    Raises:
        PlanError: the model does not run.
    """
    head = find_decoder(model, required=False).head
    if head in styles and not isinstance(styles[head], Style):
        return f"{head} has a style of torch's ({type(styles[head]).__name__})"
    model = copy.deepcopy(model).train()
    inputs = _moved(model, sampler.tokens(MicroBatch(2, 4), 0))
    try:
        with torch.no_grad():
            labels = torch.zeros(logits_of(call(model, inputs)).shape[:-1], dtype=torch.int64)
            with FusedLoss(model)(labels):
                logits = logits_of(call(model, inputs))
        cross_entropy(logits, labels, 1)
    except NotFused as error:
        return str(error)
    except FAILURES as error:
        raise does_not_run(model, error, "in its first forward") from error
    return None


def _refusal(
    model: nn.Module, sampler: Sampler, batch: MicroBatch, what: str, *, cached: bool = False
) -> str | None:
    """Return the error with which `model` refuses `what` of `batch`, with its source location; None if it runs.

    Raises:
        PlanError: the model fails with an error that is not a refusal of its own code.
    """
    model, tokens = copy.deepcopy(model), sampler.tokens(batch, 0, cached=cached)
    inputs, token = _moved(model, tokens), _moved(model, next_token(tokens, sampler))
    try:
        if cached:
            output = evaluate(model, inputs | {"use_cache": True})
            if (continuation := continued(model, token, output)) is None:
                return f"its forward returns no cache called {either(CACHES)}"
            evaluate(model, continuation)
        else:
            call(model.train(), inputs)
    except FAILURES as error:
        # An error of our kernels or of torch is a mistake, not a refusal.
        if not isinstance(error, _REFUSALS) or isinstance(error, UserError) or is_ours(error):
            raise does_not_run(model, error, f"with {what}") from error
        return f"its forward refuses {what}: {first_line(error)} ({raised_at(error)})"
    return None


def _has_no_effect(model: nn.Module, sampler: Sampler, batch: MicroBatch, name: str) -> bool:
    """Whether the logits of `batch` are bitwise the same without the keyword `name`."""
    with_keyword = _moved(model, sampler.tokens(batch, 0))
    without = {key: value for key, value in with_keyword.items() if key != name}
    logits = []
    for inputs in (with_keyword, without):
        torch.manual_seed(0)  # adapters may have dropout
        with torch.no_grad():
            logits.append(logits_of(call(copy.deepcopy(model).train(), inputs)))
    return torch.equal(*logits)


def _moved(model: nn.Module, inputs: dict[str, Any]) -> dict[str, Any]:
    first = next(model.parameters())
    return moved(inputs, first.device, first.dtype)
