"""The tolerance of `verify`: what its unit measures, that right plans stay far below it and wrong ones far above."""

import pytest
import torch
from test_proof_wrong import Unsummed, attn
from tiny import Block, Tiny, TinyPlan
from torch import nn

from titanplans.proof import verify
from titanplans.proof.reference import Reference
from titanplans.proof.sample import randomise, token_ids
from titanplans.proof.tolerance import depth, perturb, step_unit


def deep(blocks):
    def build():
        model = Tiny()
        model.layers = nn.ModuleList(Block() for _ in range(blocks))
        return model

    return build


@pytest.mark.parametrize("blocks", [1, 5])
def test_the_margin_on_both_sides(blocks):
    """Right plans below 1% of the tolerance, whatever the weights; the least wrong one 10^8 times above.

    Measured on 12 seeds at tp = 4, one to eight blocks: at most 2.5 epsilons, of 424 to 2,272 allowed.
    """
    options = {"degrees": [4], "loss_parallel": True, "sequence_parallel": True}
    for seed in range(2):
        (case,) = verify(deep(blocks), TinyPlan, seed=seed, **options).cases
        assert case.passed
        assert all(check.error < 0.01 * check.tolerance for check in case.checks if check.what != "replicas")
    (case,) = verify(deep(blocks), attn(q_norm=lambda p: Unsummed()), **options).cases
    gradients = next(check for check in case.checks if check.what == "gradients")
    assert gradients.error > 1e8 * gradients.tolerance


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_perturbation_is_one_rounding_of_every_weight(dtype):
    model = Tiny().to(dtype)
    randomise(model, 0)
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    perturb(model, before, seed=0)
    eps = torch.finfo(dtype).eps
    for name, param in model.named_parameters():
        relative = ((param - before[name]) / before[name]).abs() / eps
        # w (1 + eps) is rounded to a multiple of w's own spacing, between eps/2 and eps of it.
        assert (relative > 0.4).all()
        assert (relative < 2.1).all()


def test_the_unit_follows_the_condition_of_a_quantity():
    """A loss of 10^6 times larger logits reacts as much more to a rounding; the unit has to know."""

    def unit(scale):
        model = Tiny().double()
        randomise(model, 0)
        with torch.no_grad():
            model.lm_head.weight *= scale
        reference = Reference(model, token_ids(model, 2, 16, 1, 0), 0)
        return reference.units["loss", ""], reference.expected["loss", ""].item()

    flat, loss = unit(1e-6)
    assert flat < 4e-16 * loss, (
        "logits near 0: the loss is the logarithm of the vocabulary, whatever they are"
    )
    steep, loss = unit(1.0)
    assert 2e-16 * loss < steep < 1e-13


def test_a_gradient_that_is_nothing_but_rounding_has_a_unit_of_its_own():
    model = Tiny()
    model.layers[0].attn.k_proj = nn.Linear(16, 16)
    model.double()
    randomise(model, 0)
    reference = Reference(model, token_ids(model, 2, 16, 1, 0), 0)
    bias, weight = (("gradients", f"layers.0.attn.k_proj.{name}") for name in ("bias", "weight"))
    noise, neighbour = (reference.expected[key].abs().max() for key in (bias, weight))
    assert noise < 1e-15 < neighbour
    assert reference.units[bias] > 0.1 * noise
    # And yet a gradient of the size that its neighbour has would be far outside.
    assert reference.tolerance * reference.units[bias] < 1e-8 * neighbour


def test_depth_counts_the_sums_of_a_model():
    """One block of Tiny: 4 projections of 16 x 16, 3 of 16 x 24, embedding and head of 32 x 16; 2 x 10 tokens."""
    matrices = 4 * 32 + 3 * 40 + 2 * 48
    assert depth(deep(1)(), torch.empty(2, 10, 32)) == matrices + 20 + 10 + 32


def test_the_step_of_a_gradient_within_its_tolerance_is_allowed_for():
    """AdamW's first step is lr g / (|g| + e): a sign that rounding decides is worth two steps, a firm one nothing."""
    weight = torch.zeros(4, dtype=torch.float64)
    gradient = torch.tensor([1.0, -1.0, 1e-20, 1e-8], dtype=torch.float64)
    parameter = nn.Parameter(weight.clone())
    optimizer = torch.optim.AdamW([parameter])
    unit, tolerance = 1e-10, 1000.0
    allowed = tolerance * step_unit(weight, gradient, unit, tolerance, optimizer)
    lr = optimizer.defaults["lr"]
    assert (allowed[:2] < 1e-7 * lr).all()
    assert allowed[2] > 1.7 * lr
    for sign in (1, -1):  # what the optimizer does with a gradient at either end
        steps = []
        for moved in (gradient, gradient + sign * tolerance * unit):
            p = nn.Parameter(weight.clone())
            p.grad = moved
            torch.optim.AdamW([p]).step()
            steps.append(p.detach())
        assert ((steps[0] - steps[1]).abs() <= allowed).all()
