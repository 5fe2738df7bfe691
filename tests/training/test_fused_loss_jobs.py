"""The loss of a job: computed in the head where possible, else from logits, with the reason in the log."""

import logging

import pytest
import torch

from tests import zoo
from titanplans.config.sections.optimization import Loss
from titanplans.loss import DeferredLogits, NotFused
from titanplans.training.trainer.loss import CrossEntropyLoss
from titanplans.training.trainer.model import LanguageModel

TOKENS = torch.arange(24).reshape(2, 12)
LABELS = TOKENS.roll(-1, 1)


def language_model() -> LanguageModel:
    model = LanguageModel(zoo.config("llama", options=False))
    model.lm.to_empty(device="cpu")
    model.initialize()
    return model


def losses(fused, model):
    """The loss of a step, and that of a validation."""
    loss = CrossEntropyLoss(Loss(fused=fused, label_smoothing=0.2, z_loss=0.1))
    model.set_loss(loss, None)
    found = []
    for training, tokens in ((True, torch.tensor(24)), (False, None)):
        model.lm.train(training)
        with torch.set_grad_enabled(training):
            logits = model(TOKENS, labels=LABELS)
            found.append(loss(logits, LABELS, tokens).detach())
    return found, isinstance(logits, DeferredLogits)


def test_fused_and_of_logits_it_is_the_same_and_smoothed_in_training_alone():
    model = language_model()
    (trained, validated), stands_in = losses(None, model)
    (other, wanted), logits = losses(False, model)
    assert (stands_in, logits) == (True, False)
    torch.testing.assert_close((trained, validated), (other, wanted), rtol=1e-6, atol=0)
    model.lm.train(False)
    plain = torch.nn.functional.cross_entropy(model(TOKENS).flatten(0, 1), LABELS.flatten(), reduction="sum")
    torch.testing.assert_close(validated, plain.detach(), rtol=1e-6, atol=0)
    assert trained > plain / 24 * 1.01


def doubled(model):
    def double(module, args, output):
        output.logits = output.logits * 2
        return output

    model.lm.register_forward_hook(double)
    return model


def test_a_model_that_does_more_with_its_logits_gets_the_loss_of_these_and_the_log_says_so(caplog):
    model = doubled(language_model())
    with caplog.at_level(logging.INFO):
        found, stands_in = losses(None, model)
    assert not stands_in
    assert model.fused is None
    (message,) = (text for text in caplog.messages if "fused" in text)
    assert message.startswith(
        "the loss is computed from logits, not in the head (loss.fused is unset): after its head "
    )
    assert "switch" not in message  # it is off
    wanted, _ = losses(False, model)
    assert found == wanted


def test_where_it_was_asked_for_that_is_an_error():
    with pytest.raises(NotFused, match=r"makes -200 of a logit of -100.*\(loss.fused = false\)"):
        losses(True, doubled(language_model()))
    model = language_model()
    model.lm.lm_head = torch.nn.Sequential(model.lm.lm_head)
    with pytest.raises(NotFused, match=r"is a Sequential, and no nn\.Linear"):
        losses(True, model)
    assert losses(None, model)[1] is False
