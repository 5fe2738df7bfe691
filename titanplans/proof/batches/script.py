"""The input tensors of a scenario's steps, of its evaluation and of its forwards with a cache."""

from dataclasses import dataclass
from typing import Any

import torch

from titanplans.proof.batches.conditions import MicroBatch, Scenario
from titanplans.proof.batches.sample import Sample, Sampler, moved


@dataclass(frozen=True)
class Script:
    """The tensors of a scenario, on the model's device."""

    steps: tuple[tuple[Sample, ...], ...]
    evaluated: tuple[dict[str, Any], ...]
    """Inputs of each forward of the evaluation."""
    cached: tuple[dict[str, Any], dict[str, Any]] | None
    """Inputs of a forward that fills a cache, and of a forward that takes the next token of each sequence; None: no
    cache."""
    freezes: bool
    """Some parameters are frozen."""
    thaws: bool
    """In the last step the frozen parameters train, and the parameters that trained before are frozen."""


def write_script(
    scenario: Scenario, sampler: Sampler, device: torch.device, logits: torch.Size | None
) -> Script:
    """Return the tensors of `scenario`, floating-point ones in its dtype. `logits` as in `Sampler.sample`."""
    dtype = getattr(torch, scenario.dtype)

    def to_device(sample: Sample) -> Sample:
        return Sample(moved(sample.inputs, device, dtype), sample.labels.to(device))

    steps, count = [], 0
    for step in scenario.steps:
        steps.append([to_device(sampler.sample(b, index, logits)) for index, b in enumerate(step, count)])
        count += len(step)
    first = scenario.steps[0]
    cached = None
    evaluated = tuple(
        moved(sampler.tokens(batch, count + 1 + 2 * n), device, dtype)
        for n, batch in enumerate(scenario.evaluated)
    )
    if scenario.cached and sampler.caches:
        # The prompt is padded on the left, as prompts of different lengths usually are. It has no documents, since a cache
        # can't be combined with them.
        preferred = "left" if any(batch.padding for batch in first) else ""
        padding = preferred if preferred in sampler.caches else sampler.caches[0]
        prompt = sampler.tokens(MicroBatch(first[0].size, first[0].length, padding), count + 2, cached=True)
        cached = moved(prompt, device, dtype), moved(next_token(prompt, sampler), device, dtype)
    thaws = bool(scenario.frozen) and len(scenario.steps) > 1
    return Script(tuple(map(tuple, steps)), evaluated, cached, bool(scenario.frozen), thaws)


def next_token(prompt: dict[str, Any], sampler: Sampler) -> dict[str, Any]:
    """Return the inputs of one more token for each sequence of `prompt`: the sequence's last token again."""
    ids = prompt[sampler.ids_name]
    token = {sampler.ids_name: ids.narrow(sampler.sequence_dim, ids.shape[sampler.sequence_dim] - 1, 1)}
    if "attention_mask" in prompt:
        mask = prompt["attention_mask"]
        token["attention_mask"] = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
    return token
