"""The tolerance of `verify`: what its rounding unit measures, and how far errors of correct and wrong plans are from it."""

from dataclasses import replace

import pytest
import torch
from titanplans.plans.hf.qwen import Qwen3Plan
from torch import nn

from tests import zoo
from tests.support.faulty_styles import Unsummed, hooked, tiny_plan_with
from tests.support.plain_proofs import verify_sharded
from tests.support.tiny_model import Block, Tiny, TinyPlan
from titanplans import proof
from titanplans.proof.batches.conditions import PLAIN, MicroBatch
from titanplans.proof.batches.cover import trainings
from titanplans.proof.batches.sample import Sampler, randomise
from titanplans.proof.cases import Proof
from titanplans.proof.compare.reference import ReferenceRun
from titanplans.proof.compare.tolerance import Tolerance, depth, perturb, weight_unit


def deep(blocks):
    def build():
        model = Tiny()
        model.layers = nn.ModuleList(Block() for _ in range(blocks))
        return model

    return build


@pytest.mark.parametrize("blocks", [1, 5])
def test_correct_plans_are_far_below_the_tolerance_and_wrong_ones_far_above(blocks):
    """Correct plans are below 1% of the tolerance; the wrong plan with the smallest error is 10^8 times above it.

    Measured with 12 seeds at tp = 4 and one to eight blocks: at most 2.5 epsilons, with a tolerance of 424 to 2,272.
    """
    for seed in range(2):
        (case,) = verify_sharded(deep(blocks), TinyPlan, seed=seed, degrees=[4]).cases
        assert case.passed
        assert all(check.error < 0.01 * check.tolerance for check in case.checks if check.what != "replicas")
    (case,) = verify_sharded(deep(blocks), tiny_plan_with(q_norm=lambda p: Unsummed()), degrees=[4]).cases
    gradients = next(check for check in case.checks if check.what == "gradients")
    assert gradients.error > 1e8 * gradients.tolerance


class Staircase(torch.autograd.Function):
    """Rounds to multiples of 1/1024, as quantized weights and activations are; the backward is the identity."""

    @staticmethod
    def forward(ctx, x):
        return (x * 1024).round() / 1024

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def quantised():
    torch.manual_seed(0)
    model = Tiny()
    for block in model.layers:
        block.register_forward_pre_hook(lambda module, args: (Staircase.apply(args[0]), *args[1:]))
    return model


def rounding(plan):
    """Return a style of `o_proj` that rounds its output to bfloat16."""
    return hooked(plan.rowwise(), lambda output: output.bfloat16().float())


def test_a_quantisation_step_crossed_by_rounding_is_tolerated():
    """For one seed in fifty, depending on the CPU, three perturbed runs cross no step, but the split model does."""
    for seed in range(400):
        report = verify_sharded(quantised, TinyPlan, dtype=torch.float32, seed=seed)
        assert report.passed, report.table()
        if any("the usual 3 runs were not enough" in message for message in report.uncovered):
            break
    else:
        raise AssertionError("no seed moves a number over an edge")
    for wrong in ({"q_norm": lambda plan: Unsummed()}, {"o_proj": rounding}):
        assert not verify_sharded(quantised, tiny_plan_with(**wrong), dtype=torch.float32, seed=seed).passed


def reference_of(model):
    return ReferenceRun(model, PLAIN, Sampler(model, None, 1, 0))


@pytest.mark.parametrize(
    ("dtype", "fraction"), [(torch.float64, 1.0), (torch.float32, 1 / 8), (torch.bfloat16, 1 / 8)]
)
def test_a_perturbation_is_one_rounding_of_weights(dtype, fraction):
    model = Tiny().to(dtype)
    randomise(model, 0)
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    perturb(model, seed=0)
    eps = torch.finfo(dtype).eps
    moved = []
    for name, param in model.named_parameters():
        relative = ((param - before[name]) / before[name]).abs() / eps
        moved.append(relative[relative > 0])
        # w (1 + eps) is rounded to a multiple of the spacing at w, which is between eps/2 and eps times w.
        assert (moved[-1] > 0.4).all()
        assert (moved[-1] < 2.1).all()
    assert sum(map(len, moved)) / sum(p.numel() for p in model.parameters()) == pytest.approx(
        fraction, rel=0.1
    )


def test_the_unit_follows_the_condition_of_a_quantity():
    """If logits are 10^6 times as large, a rounding changes the loss 10^6 times as much, so the unit has to grow, too."""

    def unit(scale):
        model = Tiny().double()
        randomise(model, 0)
        with torch.no_grad():
            model.lm_head.weight *= scale
        reference, loss = reference_of(model), ("step 1, batch 1", "loss", "")
        return reference.units[loss], reference.expected[loss].item()

    flat, loss = unit(1e-6)
    assert flat < 4e-16 * loss, (
        "logits near 0: the loss is the logarithm of the vocabulary, whatever they are"
    )
    steep, loss = unit(1.0)
    assert 2e-16 * loss < steep < 1e-13


def test_a_gradient_that_is_only_rounding_has_its_own_unit():
    model = Tiny()
    model.layers[0].attn.k_proj = nn.Linear(16, 16)
    model.double()
    randomise(model, 0)
    reference = reference_of(model)
    bias, weight = (("step 1", "gradients", f"layers.0.attn.k_proj.{name}") for name in ("bias", "weight"))
    noise, neighbour = (reference.expected[key].abs().max() for key in (bias, weight))
    assert noise < 1e-15 < neighbour
    assert reference.units[bias] > 0.1 * noise
    # If a gradient is replaced by one of the size of the neighbouring module's gradient, the error is still far outside.
    assert reference.tolerance.allowed(2) * reference.units[bias] < 1e-8 * neighbour


def test_depth_counts_the_sums_of_a_model():
    """One block of Tiny: 4 projections of 16 x 16, 3 of 16 x 24, embedding and head of 32 x 16; 2 x 10 tokens."""
    matrices = 4 * 32 + 3 * 40 + 2 * 48
    assert depth(deep(1)(), torch.empty(2, 10, 32)) == matrices + 20 + 10 + 32


@pytest.mark.parametrize("steps", [1, 3])
def test_the_effect_of_rounded_gradients_on_weights_is_tolerated(steps):
    """AdamW divides a gradient by its own size. If a gradient is near zero, its rounding is a large fraction of the
    step."""
    torch.manual_seed(0)
    weight = torch.zeros(1000, dtype=torch.float64)
    sizes = 10.0 ** torch.linspace(-12, 0, 1000, dtype=torch.float64)
    gradients = [sizes * torch.randn(1000, dtype=torch.float64) for _ in range(steps)]

    def trained(moved):
        parameter = nn.Parameter(weight.clone())
        optimizer = torch.optim.AdamW([parameter])
        for gradient in gradients:
            parameter.grad = gradient + moved * torch.randn(1000, dtype=torch.float64).sign()
            optimizer.step()
        return parameter.detach(), optimizer

    expected, optimizer = trained(0.0)
    allowed = weight_unit(expected, 1e-13, steps, optimizer)
    largest_difference = max((trained(1e-13)[0] - expected).abs().max().item() for _ in range(20))
    assert 0.05 * allowed < largest_difference < allowed
    # A gradient of the other sign is far outside, even after a thousand roundings.
    assert 1000 * allowed < optimizer.defaults["lr"]


def test_in_fewer_bits_the_bound_grows_only_with_the_ranks():
    bounds = [Tolerance(deep(n)(), torch.empty(2, 10, 32), steps=3) for n in (1, 8)]
    assert bounds[0].allowed(2) == bounds[1].allowed(2) < bounds[0].allowed(8) < 13
    assert bounds[0].difference(torch.tensor([3.0, 4.0]), torch.zeros(2)) == pytest.approx(12.5**0.5)


def test_in_16_bits_only_losses_and_norms_are_compared():
    bound = Tolerance(Tiny(), torch.empty(2, 10, 32, dtype=torch.bfloat16), steps=3)
    kinds = ("loss", "logits", "gradients", "norm", "AdamW")
    assert [what for what in kinds if bound.compares(what)] == ["loss", "norm"]
    for dtype in (torch.float32, torch.float64):
        assert all(map(Tolerance(Tiny(), torch.empty(2, 10, 32, dtype=dtype), steps=3).compares, kinds))


@pytest.mark.parametrize("ranks", [2, 4, 8, 16, 64])
def test_a_tolerance_is_smaller_than_the_contribution_of_one_rank(ranks):
    """This is tested for the largest unit that is accepted, which is searched in steps of 1%."""
    tolerance = Tolerance(Tiny(), torch.zeros(2, 8, 32), 1)
    unit = 1.0
    while tolerance.hides(unit, size=1.0, ranks=ranks):
        unit *= 0.99
    assert 0.7 / max(ranks, 8) < tolerance.allowed(ranks) * unit < 1 / ranks


def test_in_16_bits_a_unit_is_the_largest_of_its_kind_so_far():
    """The unit of the first step is too small for later steps, because these start from weights that differ by
    rounding."""
    (first, *_) = trainings(MicroBatch(), 128)
    model = zoo.build("gla").train()
    randomise(model, 0)
    reference = ReferenceRun(
        model, replace(first, dtype="bfloat16"), Sampler(model, None, 1, 0), further=True
    )
    relative: dict[str, list[float]] = {"loss": [], "norm": []}
    for (point, what, where), unit in reference.units.items():
        if what in relative:
            relative[what].append(unit / reference.expected[point, what, where].item())
    for shares in relative.values():
        assert shares == pytest.approx(sorted(shares), rel=1e-6)
        assert shares[-1] > 1.5 * shares[0]
    assert relative["norm"][0] >= torch.finfo(torch.bfloat16).eps * (1 - 1e-6)


class Broken16(Qwen3Plan):
    """Makes one gradient infinite in 16 bits. Neither the loss nor, after clipping, another gradient shows it."""

    def rowwise(self, **options):
        def broken(output):
            if output.dtype == torch.bfloat16 and output.requires_grad:
                output.register_hook(lambda grad: grad.index_fill(-1, torch.tensor(0), float("inf")))
            return output

        return hooked(super().rowwise(**options), broken)


@pytest.mark.thorough
def test_in_16_bits_an_infinite_gradient_is_rejected(monkeypatch):
    monkeypatch.setattr(Proof, "cases", in_16_bits(Proof.cases))
    report = proof.verify(
        lambda: zoo.build("qwen3", num_hidden_layers=1), Broken16, degrees=[2], sequence_parallel=True
    )
    for case in report.cases:
        (gradients,) = [check for check in case.checks if check.what == "gradients"]
        assert not gradients.passed


def in_16_bits(cases):
    """Return a method for `Proof.cases` that returns two cases in 16 bits alone."""

    def cases_in_16_bits(self, *args):
        every, trained = cases(self, *args)
        return [case for case in every if case[1].dtype == "bfloat16"][:2], trained

    return cases_in_16_bits
