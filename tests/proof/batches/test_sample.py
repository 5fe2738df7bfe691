"""Samples cover the vocabulary, and random weights depend on the seed and the name alone."""

import torch

from tests.support.tiny_model import Tiny
from titanplans.proof.batches.conditions import MicroBatch
from titanplans.proof.batches.sample import Sampler, randomise


def test_tokens_and_labels_reach_every_shard():
    sample = Sampler(Tiny(), None, 1, seed=0).sample(MicroBatch(), 0, None)
    tokens, labels = sample.inputs["input_ids"], sample.labels
    assert tokens.shape == (2, 16)
    for ids in (tokens, labels):
        assert ids.unique().tolist() == list(range(32)), "each token of the vocabulary occurs"
    assert not tokens.equal(labels)
    assert Sampler(Tiny(), None, 0, seed=0).tokens(MicroBatch(), 0)["input_ids"].shape == (16, 2)


def test_weights_depend_on_seed_and_name_only():
    def weights(seed):
        torch.manual_seed(seed + 1)  # the default generator must not matter
        model = Tiny()
        randomise(model, 0)
        return model

    first, second = weights(0), weights(1)
    assert first.lm_head.weight.equal(second.lm_head.weight)
    assert first.norm.weight.equal(second.norm.weight)
    assert not first.layers[0].attn.q_proj.weight.equal(first.layers[1].attn.q_proj.weight)
    assert 0.5 < first.lm_head.weight.std() * 4 < 1.5
    randomise(second, 1)
    assert not first.lm_head.weight.equal(second.lm_head.weight)
