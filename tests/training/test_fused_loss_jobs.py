"""The loss of a job: fused with the head where possible, otherwise from logits, with the reason in the log."""

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
    """Return the losses of a training step and of a validation, and whether logits are deferred."""
    loss = CrossEntropyLoss(Loss(fused=fused, label_smoothing=0.2, z_loss=0.1))
    model.set_loss(loss, None)
    values = []
    for training, tokens in ((True, torch.tensor(24)), (False, None)):
        model.lm.train(training)
        with torch.set_grad_enabled(training):
            logits = model(TOKENS, labels=LABELS)
            values.append(loss(logits, LABELS, tokens).detach())
    return values, isinstance(logits, DeferredLogits)


def test_the_fused_loss_equals_that_of_logits_and_is_smoothed_only_in_training():
    model = language_model()
    (trained, validated), stands_in = losses(None, model)
    (trained_from_logits, validated_from_logits), logits = losses(False, model)
    assert (stands_in, logits) == (True, False)
    torch.testing.assert_close(
        (trained, validated), (trained_from_logits, validated_from_logits), rtol=1e-6, atol=0
    )
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


def test_a_model_that_changes_its_logits_gets_their_loss_and_a_log_line(caplog):
    model = doubled(language_model())
    with caplog.at_level(logging.INFO):
        actual, stands_in = losses(None, model)
    assert not stands_in
    assert model.fused is None
    (message,) = (text for text in caplog.messages if "fused" in text)
    assert message.startswith(
        "the loss is computed from logits, not in the head (loss.fused is unset): after its head "
    )
    assert "switch" not in message  # that advice is only for jobs that request fusing
    expected, _ = losses(False, model)
    assert actual == expected


def test_a_fused_loss_that_is_requested_and_impossible_is_an_error():
    with pytest.raises(NotFused, match=r"turns a logit of -100 into -200.*\(loss.fused = false\)"):
        losses(True, doubled(language_model()))
    model = language_model()
    model.lm.lm_head = torch.nn.Sequential(model.lm.lm_head)
    with pytest.raises(NotFused, match=r"is a Sequential, not an nn\.Linear"):
        losses(True, model)
    assert losses(None, model)[1] is False
