"""Steps of a proof: local tensors are assembled, errors diagnosed, samples drawn, reports printed."""

import torch

from tests.support.tiny_model import Tiny
from titanplans import Degrees, TPOptions
from titanplans.kernels.widen import Widen
from titanplans.proof.batches.conditions import PLAIN, MicroBatch
from titanplans.proof.batches.sample import Sampler, randomise
from titanplans.proof.compare.assemble import best_fit
from titanplans.proof.compare.tolerance import difference
from titanplans.proof.explain.localise import diagnose
from titanplans.proof.report import Report
from titanplans.proof.result import CaseResult, Check, Finding, Location, Refusal


def fit(local_tensors, expected, sums=True, **ranks):
    best = best_fit(local_tensors, expected, difference, sums=sums, **ranks)
    return None if best is None else (best.error, best.how)


def test_local_tensors_are_assembled_in_the_way_that_fits_best():
    full = torch.randn(2, 12, 5, dtype=torch.float64)
    summands = [torch.randn_like(full) for _ in range(3)]
    summands.append(full - sum(summands))
    assert fit([full] * 4, full) == (0.0, "")
    error, how = fit(summands, full)
    assert error < 1e-14
    assert how == "summed over the ranks"
    error, how = fit(summands, full, sums=False)
    assert error > 0.1
    assert fit(list(full.chunk(4, 1)), full) == (0.0, "")
    padded = torch.cat([full[:, :10], torch.zeros(2, 2, 5)], 1).chunk(4, 1)
    assert fit(list(padded), full[:, :10]) == (0.0, ""), "three tokens a rank, the last two of them padding"
    heads = [half for half in full.chunk(2, 1) for _ in range(2)]
    assert fit(heads, full) == (0.0, "the same on each 2 ranks")
    halves = [half * factor for half in full.chunk(2, 1) for factor in (0.25, 0.75)]
    assert fit(halves, full)[1] == "summed over each 2 ranks"
    assert fit([full[:1, :3]] * 4, full) is None
    assert fit(list(full.chunk(4, 1)), full.flatten(0, 1)) is None


def test_local_tensors_over_cp_and_tp_are_assembled():
    """The outer dimension (cp) splits tokens, the inner (tp) widths. Ranks of a mixer have all tokens of their heads."""
    full = torch.randn(2, 7, 12, dtype=torch.float64)
    padded = torch.cat([full, torch.zeros(2, 1, 12)], 1).chunk(2, 1)
    widths = [width for tokens in padded for width in tokens.chunk(2, -1)]
    assert fit(widths, full) is None
    assert fit(widths, full, inner=2) == (0.0, "")
    first, second, third, fourth = full.chunk(4, -1)
    heads = [first, third, second, fourth]
    assert fit(heads, full)[0] > 0.1
    assert fit(heads, full, inner=2) == (0.0, "")
    packed = [shard for tokens in padded for shard in _sections(tokens)]
    assert fit(packed, full, inner=2)[0] > 0.1
    assert fit(packed, full, inner=2, packings=[(8, 4)]) == (0.0, "")


def _sections(x):
    """Return the packed shards of two ranks: each has its half of both sections, of 8 and of 4."""
    first, second = (section.chunk(2, -1) for section in x.split([8, 4], -1))
    return [torch.cat(halves, -1) for halves in zip(first, second, strict=True)]


def test_errors_are_diagnosed_from_values():
    right = torch.randn(6, dtype=torch.float64)
    summands = [torch.randn_like(right), torch.randn_like(right)]
    summands.append(right - sum(summands))

    def reason(value, local_tensors=None):
        return diagnose(value, local_tensors, right, 1e-12, 3)

    assert "not summed" in reason(summands[0], summands)
    assert "exactly 3 times too large: once for each rank" in reason(right * 3)
    assert "exactly 1/3 of it" in reason(right / 3)
    assert "exactly 2 times the right one" in reason(right * 2)
    assert "exactly -1 times" in reason(-right)
    assert reason(torch.zeros(6)) == "all zeros"
    assert "of shape (5,), not (6,)" in reason(right[:5])
    assert reason(right * 3 + 1e-6) == "", "almost 3 times is not exactly 3 times"
    assert reason(right.flip(0)) == ""


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


def test_float32_is_widened_by_name_and_as_the_default():
    with Widen(torch.float64):
        tensors = [
            torch.zeros(2),
            torch.empty(2, dtype=None),
            torch.ones(2, dtype=torch.float32),
            torch.eye(2),
        ]
        assert {x.dtype for x in tensors} == {torch.float64}
        assert torch.zeros(2, dtype=torch.int64).dtype == torch.int64
        third = torch.arange(2) / 3
        assert third[1].item() == 1 / 3, "a quotient of integers"
        assert torch.where(third > 0, 1.0, 2.0).dtype == torch.float64
        assert torch.ones(2, dtype=torch.bfloat16).float().dtype == torch.float64


def test_experts_in_float64_multiply_their_own_tokens():
    """torch has no kernel for grouped float64 products. The second expert gets no token, and one token no expert."""
    generator = torch.Generator().manual_seed(0)
    tokens, weights, gradient = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((6, 4), (3, 4, 5), (6, 5))
    )
    ends, expert = torch.tensor([2, 2, 5], dtype=torch.int32), [0, 0, 2, 2, 2, None]

    def grouped(tokens, weights):
        with Widen(torch.float64):
            return torch._grouped_mm(tokens, weights, offs=ends)

    def one_by_one(tokens, weights):
        zeros = tokens.new_zeros(5)
        return torch.stack([zeros if e is None else tokens[at] @ weights[e] for at, e in enumerate(expert)])

    results = []
    for multiply in (grouped, one_by_one):
        leaves = [tokens.clone().requires_grad_(), weights.clone().requires_grad_()]
        product = multiply(*leaves)
        results.append([product, *torch.autograd.grad(product, leaves, gradient)])
    for grouped_result, expected in zip(*results, strict=True):
        assert torch.allclose(grouped_result, expected)


def test_the_report_is_a_table():
    def case(degree, error, finding=None):
        checks = (Check("loss", 0.5, 700.0), Check("gradients", error, 700.0, "norm"))
        return CaseResult(TPOptions(Degrees(tp=degree), True, False), PLAIN, checks, finding=finding)

    finding = Finding(
        "backward",
        Location("layers.0.norm.weight", 2e15),
        (Location("layers.0.proj.weight", 1.25, "summed over the ranks"),),
        "exactly 2 times too large: once for each rank",
    )
    four, eight = Degrees(tp=4), Degrees(tp=8)
    report = Report(
        "Model, Plan", "float64", (case(2, 3.0), case(4, 2e15, finding)),
        (Refusal((TPOptions(eight), TPOptions(eight, False, False)), "num_heads = 4"), Refusal((TPOptions(four),), "odd")),
        (PLAIN,), ("padding: no attention_mask",),
    )  # fmt: skip
    assert not report.passed
    assert report.table() == "\n".join([
        "Model, Plan, float64, ranks: threads",
        "",
        "tp  loss     sequence    training  loss  logits  gradients  replicas  norm  AdamW  verdict  worst",
        " 2  sharded  replicated  A          0.5       -        3.0         -     -      -  right    gradients norm",
        " 4  sharded  replicated  A          0.5       -    2.0e+15         -     -      -  WRONG    gradients norm",
        "",
        "wrong: tp 4, loss sharded, sequence replicated",
        "  backward: first wrong at layers.0.norm.weight: 2.0e+15 epsilons, exactly 2 times too large: once for each rank; "
        "correct nearby: layers.0.proj.weight (summed over the ranks) 1.2",
        "",
        "not proved: tp 8: num_heads = 4",
        "not proved: tp 4, loss sharded, sequence sharded: odd",
        "not covered: padding: no attention_mask",
        "1 of 2 cases WRONG. Differences in epsilons, what one rounding of every weight changes; sums in another order may "
        "differ by 700.0.",
    ])  # fmt: skip


def test_a_report_without_cases_has_not_passed():
    assert not Report("Model, Plan", "float64", ()).passed
