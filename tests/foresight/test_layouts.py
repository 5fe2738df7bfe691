"""The degrees that a number of GPUs and a batch allow."""

from titanplans.foresight.layouts import Excluded, JobLayout, candidates, with_experts
from titanplans.plan.degrees import Degrees


def test_candidates():
    every = list(candidates(8, 4))
    degrees = [each for each in every if not isinstance(each, Excluded)]
    assert all(each.dp_shard * each.tp * each.cp * each.pp == 8 for each in degrees)
    refused = {each.what: each.why for each in every if isinstance(each, Excluded)}
    assert refused["tp 1"] == "4 sequences can't be divided by 8 data-parallel ranks"
    assert refused["tp 1, pp 2"] == "a data-parallel rank has only 1 sequences for 2 stages"
    assert Degrees(dp_shard=4, tp=2) in degrees
    assert [each.ep for each in with_experts(Degrees(dp_shard=2, tp=2), True)] == [1, 2, 4]
    assert [each.ep for each in with_experts(Degrees(dp_shard=2, tp=2), False)] == [1]
    assert Degrees(dp_replicate=2, dp_shard=2, tp=2) in list(candidates(8, 4, replicas=2))


def test_batches_of_a_step():
    layout = JobLayout(Degrees(dp_replicate=2, dp_shard=4), "none", 2, 64)
    assert layout.batches == 4
    assert layout.with_batches(1).sequences == 16
