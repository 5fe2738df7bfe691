"""The parts of a proof by themselves: tensors put together, errors named, tokens that reach every shard, the table."""

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


def fit(held, expected, sums=True, **ranks):
    found = best_fit(held, expected, difference, sums=sums, **ranks)
    return None if found is None else (found.error, found.how)


def test_tensors_are_put_together_by_what_fits():
    whole = torch.randn(2, 12, 5, dtype=torch.float64)
    parts = [torch.randn_like(whole) for _ in range(3)]
    parts.append(whole - sum(parts))
    assert fit([whole] * 4, whole) == (0.0, "")
    error, how = fit(parts, whole)
    assert error < 1e-14
    assert how == "summed over the ranks"
    error, how = fit(parts, whole, sums=False)
    assert error > 0.1
    assert fit(list(whole.chunk(4, 1)), whole) == (0.0, "")
    filled = torch.cat([whole[:, :10], torch.zeros(2, 2, 5)], 1).chunk(4, 1)
    assert fit(list(filled), whole[:, :10]) == (0.0, ""), (
        "three tokens a rank, the last two of them filled up"
    )
    heads = [half for half in whole.chunk(2, 1) for _ in range(2)]
    assert fit(heads, whole) == (0.0, "the same on each 2 ranks")
    halves = [half * share for half in whole.chunk(2, 1) for share in (0.25, 0.75)]
    assert fit(halves, whole)[1] == "summed over each 2 ranks"
    assert fit([whole[:1, :3]] * 4, whole) is None
    assert fit(list(whole.chunk(4, 1)), whole.flatten(0, 1)) is None


def test_tensors_of_two_dimensions_of_ranks_are_put_together():
    """The first is of tokens. Of an MLP a rank has its tokens and its width, in a mixer all tokens of its heads."""
    whole = torch.randn(2, 7, 12, dtype=torch.float64)
    filled = torch.cat([whole, torch.zeros(2, 1, 12)], 1).chunk(2, 1)
    widths = [part for tokens in filled for part in tokens.chunk(2, -1)]
    assert fit(widths, whole) is None
    assert fit(widths, whole, inner=2) == (0.0, "")
    first, second, third, fourth = whole.chunk(4, -1)
    heads = [first, third, second, fourth]
    assert fit(heads, whole)[0] > 0.1
    assert fit(heads, whole, inner=2) == (0.0, "")
    packed = [part for tokens in filled for part in _sections(tokens)]
    assert fit(packed, whole, inner=2)[0] > 0.1
    assert fit(packed, whole, inner=2, packings=[(8, 4)]) == (0.0, "")


def _sections(x):
    """Return each of two ranks' part of both sections, of 8 and of 4."""
    first, second = (section.chunk(2, -1) for section in x.split([8, 4], -1))
    return [torch.cat(parts, -1) for parts in zip(first, second, strict=True)]


def test_errors_that_values_tell():
    right = torch.randn(6, dtype=torch.float64)
    parts = [torch.randn_like(right), torch.randn_like(right)]
    parts.append(right - sum(parts))

    def say(value, held=None):
        return diagnose(value, held, right, 1e-12, 3)

    assert "not summed" in say(parts[0], parts)
    assert "exactly 3 times too large: once for each rank" in say(right * 3)
    assert "exactly 1/3 of it" in say(right / 3)
    assert "exactly 2 times the right one" in say(right * 2)
    assert "exactly -1 times" in say(-right)
    assert say(torch.zeros(6)) == "all zeros"
    assert "of shape (5,), not (6,)" in say(right[:5])
    assert say(right * 3 + 1e-6) == "", "nearly is not exactly"
    assert say(right.flip(0)) == ""


def test_tokens_and_labels_reach_every_shard():
    sample = Sampler(Tiny(), None, 1, seed=0).sample(MicroBatch(), 0, None)
    tokens, labels = sample.inputs["input_ids"], sample.labels
    assert tokens.shape == (2, 16)
    for ids in (tokens, labels):
        assert ids.unique().tolist() == list(range(32)), "as many tokens as the vocabulary has: one of each"
    assert not tokens.equal(labels)
    assert Sampler(Tiny(), None, 0, seed=0).tokens(MicroBatch(), 0)["input_ids"].shape == (16, 2)


def test_weights_depend_on_seed_and_name_only():
    def weights(seed):
        torch.manual_seed(seed + 1)  # must not matter
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
        made = [torch.zeros(2), torch.empty(2, dtype=None), torch.ones(2, dtype=torch.float32), torch.eye(2)]
        assert {x.dtype for x in made} == {torch.float64}
        assert torch.zeros(2, dtype=torch.int64).dtype == torch.int64
        third = torch.arange(2) / 3
        assert third[1].item() == 1 / 3, "of integers"
        assert torch.where(third > 0, 1.0, 2.0).dtype == torch.float64
        assert torch.ones(2, dtype=torch.bfloat16).float().dtype == torch.float64


def test_experts_in_float64_multiply_their_own_rows():
    """torch has no kernel for that. The second expert gets no row, and one row no expert."""
    generator = torch.Generator().manual_seed(0)
    rows, weights, gradient = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((6, 4), (3, 4, 5), (6, 5))
    )
    ends, expert = torch.tensor([2, 2, 5], dtype=torch.int32), [0, 0, 2, 2, 2, None]

    def grouped(rows, weights):
        with Widen(torch.float64):
            return torch._grouped_mm(rows, weights, offs=ends)

    def one_by_one(rows, weights):
        zeros = rows.new_zeros(5)
        return torch.stack([zeros if e is None else rows[at] @ weights[e] for at, e in enumerate(expert)])

    found = []
    for multiply in (grouped, one_by_one):
        leaves = [rows.clone().requires_grad_(), weights.clone().requires_grad_()]
        product = multiply(*leaves)
        found.append([product, *torch.autograd.grad(product, leaves, gradient)])
    for one, other in zip(*found, strict=True):
        assert torch.allclose(one, other)


def test_the_table():
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


def test_no_case_proves_nothing():
    assert not Report("Model, Plan", "float64", ()).passed
