"""Stages that run one after the other in one process, against the unsplit model."""

import torch

from titanplans.loss import cross_entropy
from titanplans.proof.compare.forward import widened
from titanplans.split.stages.trace import logits_of, without_cache


def step(stages, inputs):
    """The logits, after a backward through all stages."""
    crossing = ()
    for stage in stages:
        crossing = stage.run(
            crossing, lambda stage=stage: stage.model(**inputs, **without_cache(stage.model))
        )
    labels = inputs["input_ids"]
    cross_entropy(logits_of(crossing), labels, labels.numel()).backward()
    return logits_of(crossing)


def check(model, stages, inputs):
    with widened(torch.float64):
        expected = logits_of(model(**inputs, **without_cache(model)))
        labels = inputs["input_ids"]
        cross_entropy(expected, labels, labels.numel()).backward()
        assert torch.equal(step(stages, inputs), expected)
    grads = [dict(stage.model.named_parameters(remove_duplicate=False)) for stage in stages]
    names = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(param, []).append(name)
    for param, known in names.items():
        held = {id(own[name]): own[name].grad for own in grads for name in known if name in own}
        parts = [grad for grad in held.values() if grad is not None]
        assert (param.grad is None) == (not parts), known
        if parts:
            torch.testing.assert_close(sum(parts), param.grad, rtol=1e-9, atol=1e-12, msg=known[0])
