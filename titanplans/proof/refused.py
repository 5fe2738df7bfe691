"""Which conditions of a batch the model's own code refuses: those a proof leaves out, and says so.

A model is one step further than its signature: it takes an `attention_mask`, and asserts that there is none in training.
Only what its own code raises, to say so, counts: an error out of a stand-in of ours, or of torch, is no refusal. It is
raised again where the whole model runs, and ends the proof.
"""

import copy
from dataclasses import replace

from torch import nn

from titanplans.errors import UserError
from titanplans.proof.conditions import Batch
from titanplans.proof.raised import is_ours, raised_at
from titanplans.proof.sample import Sampler, moved
from titanplans.proof.script import one_more
from titanplans.proof.training import FAILURES, call, evaluate, first_line

_REFUSALS = (AssertionError, NotImplementedError, ValueError)
"""What code raises that does not take something. Anything else is a mistake, of the model's or of ours."""


def leave_out_what_is_refused(model: nn.Module, sampler: Sampler) -> list[str]:
    """Let `sampler` make no batch that `model` refuses; return what is left out, with the model's own words."""
    batch, left_out = Batch(2, 4), []
    padded = replace(batch, padding="left")
    if sampler.padded and (reason := _refusal(model, sampler, padded)):
        sampler.padded = False
        left_out.append(f"padding: its forward in training refuses an attention_mask: {reason}")
    if sampler.documents and (reason := _refusal(model, sampler, replace(batch, documents=True))):
        left_out.append(f"documents in a sequence: its forward refuses {sampler.documents}: {reason}")
        sampler.documents = None
    reasons = {
        padding: reason
        for padding in sampler.caches
        if (reason := _refusal(model, sampler, replace(batch, padding=padding), cached=True))
    }
    if len(set(reasons.values())) == 1 and len(reasons) == len(sampler.caches):
        left_out.append(
            f"a forward with a cache: its forward refuses use_cache: {next(iter(reasons.values()))}"
        )
    else:
        words = {
            "": "a cache without padding: its forward refuses that",
            "left": "padding with a cache: its forward refuses both",
        }
        left_out += [f"{words[padding]}: {why}" for padding, why in reasons.items()]
    sampler.caches = tuple(padding for padding in sampler.caches if padding not in reasons)
    return left_out


def _refusal(model: nn.Module, sampler: Sampler, batch: Batch, *, cached: bool = False) -> str | None:
    """Return by which words `model` refuses `batch`, and where, in training or with a cache; None if it does not."""
    model = copy.deepcopy(model)
    first = next(model.parameters())
    given = sampler.tokens(batch, 0, cached=cached)
    inputs, token = (moved(one, first.device, first.dtype) for one in (given, one_more(given, sampler)))
    try:
        if cached:
            output = evaluate(model, inputs | {"use_cache": True})
            evaluate(model, token | {"past_key_values": output.past_key_values, "use_cache": True})
        else:
            call(model.train(), inputs)
    except FAILURES as error:
        refused = isinstance(error, _REFUSALS) and not isinstance(error, UserError) and not is_ours(error)
        return f"{first_line(error)} ({raised_at(error)})" if refused else None
    return None
