"""The proof of the fused loss: correct as it is, and rejected with each fault."""

from functools import partial

import pytest
import torch

from tests.support.mutants.architectures import ARCHITECTURES
from tests.support.process_groups import run_on_threads
from titanplans import Degrees, TPOptions
from titanplans.loss import IGNORED, FusedLoss, entropy_and_gradient, fused, sharded_logits
from titanplans.proof.batches.conditions import MicroBatch, Scenario
from titanplans.proof.batches.sample import Sampler, randomise
from titanplans.proof.case import prove_case
from titanplans.proof.compare import training
from titanplans.proof.compare.reference import ReferenceRun

# soft caps, tied weights, a vocabulary of 51
(GEMMA,) = (architecture for architecture in ARCHITECTURES if architecture.name == "gemma3_text")


@pytest.fixture(scope="module")
def reference():
    model = GEMMA.build()
    randomise(model, seed=0)
    return ReferenceRun(model, Scenario(((MicroBatch(2, 8, ignored=True),),)), Sampler(model, None, 1, 0))


def proved(reference):
    scenario = Scenario(reference.scenario.steps, fused=True)
    work = partial(prove_case, reference, GEMMA.plan, TPOptions(Degrees(tp=2)), scenario)
    return run_on_threads(work)


def test_the_fused_loss_is_proved(reference):
    assert proved(reference).passed


def one_rank_alone(monkeypatch):
    """The statistics of the shards are not combined over the ranks."""
    monkeypatch.setattr(sharded_logits, "_over_ranks", lambda log_sum, own, sums, group: (log_sum, own, sums))


def no_cap(monkeypatch):
    """The soft cap after the head is left out, and so is the check that compares the soft cap with the model's code."""

    class Uncapped(FusedLoss):
        def __init__(self, model):
            super().__init__(model)
            self._after_head = None

    monkeypatch.setattr(training, "FusedLoss", Uncapped)
    monkeypatch.setattr("titanplans.loss.deferred_logits.DeferredLogits.check", lambda self: None)


def no_cap_that_is_compared(monkeypatch):
    monkeypatch.setattr("titanplans.loss.head._elementwise", lambda config: None)


def head_twice(monkeypatch):
    """The head's gradient from the first chunk is added twice."""
    product = fused.ChunkSums._product

    def twice(self, so_far, a, b):
        return product(self, so_far, a, b) * (2 if so_far is None else 1)

    monkeypatch.setattr(fused.ChunkSums, "_product", twice)


def ignored_counted(monkeypatch):
    def compute(logits, labels, *rest):
        return entropy_and_gradient(logits, torch.where(labels == IGNORED, 0, labels), *rest)

    monkeypatch.setattr(training, "FusedLoss", partial(FusedLoss, compute=compute))


def last_chunk_forgotten(monkeypatch):
    chunks = fused._chunks
    monkeypatch.setattr(fused, "_chunks", lambda tokens, most: list(chunks(tokens, most))[:-1])


@pytest.mark.parametrize(
    "fault",
    [one_rank_alone, no_cap, no_cap_that_is_compared, head_twice, ignored_counted, last_chunk_forgotten],
    ids=lambda fault: fault.__name__,
)
def test_a_fault_is_rejected(fault, reference, monkeypatch):
    fault(monkeypatch)
    assert not proved(reference).passed
