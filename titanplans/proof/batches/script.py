"""The script of a training: the input tensors of a scenario's steps, its evaluation and its cache."""

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
    """The forwards of an evaluation after the first step."""
    cached: tuple[dict[str, Any], dict[str, Any]] | None
    """After the second step, a forward that fills a cache, and one of a further token of each sequence."""
    freezes: bool
    """Some parameters do not train."""
    thaws: bool
    """In the last step frozen parameters train, and trained ones are frozen."""


def write_script(
    scenario: Scenario, sampler: Sampler, device: torch.device, logits: torch.Size | None
) -> Script:
    """Return the tensors of `scenario`, floating-point ones in its dtype. `logits` as for `Sampler.sample`."""
    dtype = getattr(torch, scenario.dtype)

    def place(sample: Sample) -> Sample:
        return Sample(moved(sample.inputs, device, dtype), sample.labels.to(device))

    steps, number = [], 0
    for step in scenario.steps:
        steps.append([place(sampler.sample(b, n, logits)) for n, b in enumerate(step, number)])
        number += len(step)
    first = scenario.steps[0]
    cached = None
    evaluated = tuple(
        moved(sampler.tokens(batch, number + 1 + 2 * n), device, dtype)
        for n, batch in enumerate(scenario.evaluated)
    )
    if scenario.cached and sampler.caches:
        # Prompts of several lengths are padded on the left. A cache doesn't go with documents.
        wanted = "left" if any(batch.padding for batch in first) else ""
        padding = wanted if wanted in sampler.caches else sampler.caches[0]
        filled = sampler.tokens(MicroBatch(first[0].size, first[0].length, padding), number + 2, cached=True)
        cached = moved(filled, device, dtype), moved(one_more(filled, sampler), device, dtype)
    thaws = bool(scenario.frozen) and len(scenario.steps) > 1
    return Script(tuple(map(tuple, steps)), evaluated, cached, bool(scenario.frozen), thaws)


def one_more(filled: dict[str, Any], sampler: Sampler) -> dict[str, Any]:
    """Return the inputs of one more token of each sequence, after those of `filled`."""
    ids = filled[sampler.ids_name]
    token = {sampler.ids_name: ids.narrow(sampler.sequence_dim, ids.shape[sampler.sequence_dim] - 1, 1)}
    if "attention_mask" in filled:
        mask = filled["attention_mask"]
        token["attention_mask"] = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
    return token
