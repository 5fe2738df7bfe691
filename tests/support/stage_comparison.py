"""Run stages one after the other in one process, and compare them with the unsplit model."""

import torch

from titanplans.loss import cross_entropy
from titanplans.proof.compare.forward import widened
from titanplans.split.stages.trace import logits_of, without_cache


def step(stages, inputs):
    """Run forward and backward through all stages; return the logits."""
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
    parameters = [dict(stage.model.named_parameters(remove_duplicate=False)) for stage in stages]
    names = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(param, []).append(name)
    for param, aliases in names.items():
        # Count each parameter once, by id: two tied names in one stage belong to one parameter, which has one gradient.
        by_id = {
            id(stage[name]): stage[name].grad for stage in parameters for name in aliases if name in stage
        }
        grads = [grad for grad in by_id.values() if grad is not None]
        assert (param.grad is None) == (not grads), aliases
        if grads:
            torch.testing.assert_close(sum(grads), param.grad, rtol=1e-9, atol=1e-12, msg=aliases[0])
