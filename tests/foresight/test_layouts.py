"""The search for layouts finds what trying all of them finds."""

import itertools
import statistics

import pytest

from tests import zoo
from tests.support import rehearsals
from titanplans.errors import ParallelError
from titanplans.foresight.forecast import forecast_of
from titanplans.foresight.hardware import find_gpu
from titanplans.foresight.layouts import MODES, Excluded, JobLayout, Search, candidates, with_experts
from titanplans.plan.degrees import Degrees

GPUS, SEQUENCES = 2, 2
LLAMA = {
    "options": False,
    "num_hidden_layers": 5,
    "hidden_size": 128,
    "intermediate_size": 256,
    "vocab_size": 512,
}


def evaluate_with(folder, gpu):
    """Return a function that estimates layouts of a tiny Llama; its attribute `layouts` lists those that it has got."""
    rehearsals.install()
    config = zoo.config("llama", **LLAMA)

    def evaluate(layouts):
        evaluate.layouts += layouts
        jobs = [
            rehearsals.job(folder, "training.seq_len=2048", "loss.fused=false", *layout.options())
            for layout in layouts
        ]
        return [forecast_of(job, config, GPUS, gpu) for job in jobs]

    evaluate.layouts = []
    return evaluate


def test_the_fastest_layout_that_fits_is_found(tmp_path):
    # Links that make tensor parallelism slow, and memory for half of the layouts.
    gpu = find_gpu("H100").replace(outside_gib=0.0, link_gb_s=10.0, host_us=0.0, bfloat16_tflops=1.0)
    degrees = [Degrees(dp_shard=2), Degrees(dp_shard=1, tp=2)]
    layouts = [
        JobLayout(each, mode, batch, SEQUENCES)
        for each, mode in itertools.product(degrees, MODES)
        for batch in (1, 2)
        if SEQUENCES % (batch * each.dp_shard) == 0
    ]
    every = dict(zip(layouts, evaluate_with(tmp_path, gpu)(layouts), strict=True))
    reserved = statistics.median_low(each.reserved(False) for each in every.values())
    gpu = gpu.replace(memory_gib=reserved / 2**30)
    fitting = {layout: each.seconds for layout, each in every.items() if each.reserved(False) <= reserved}
    assert len(fitting) < len(layouts)

    search = Search(gpu, SEQUENCES, evaluate_with(tmp_path, gpu), count=2)
    search.run(degrees)
    first, second = search.found[:2]
    assert first.is_exact
    assert second.is_exact
    assert {first.layout, second.layout} <= fitting.keys()
    assert first.seconds == pytest.approx(fitting[first.layout], rel=0.01)
    assert first.seconds <= 1.03 * min(fitting.values())


def test_layouts_that_can_not_be_among_the_best_are_not_estimated(tmp_path):
    gpu = find_gpu("H100").replace(link_gb_s=0.1, bfloat16_tflops=1.0, host_us=0.0)
    evaluate = evaluate_with(tmp_path, gpu)
    search = Search(gpu, SEQUENCES, evaluate, count=1)
    search.run([Degrees(dp_shard=2), Degrees(dp_shard=1, pp=2)])
    assert str(search.found[0].layout.degrees) == "tp 1"
    assert not any(layout.degrees.pp > 1 for layout in evaluate.layouts)
    (refused,) = [each for each in search.excluded if "pp 2" in each.what]
    assert "slower: a pipeline idles" in refused.why


def test_what_can_not_run_or_does_not_fit_is_refused_with_the_reason(tmp_path):
    gpu = find_gpu("H100").replace(memory_gib=0.001, outside_gib=0.0)
    fits_nothing = evaluate_with(tmp_path, gpu)

    def evaluate(layouts):
        return [
            ParallelError("no") if layout.mode == "full" else result
            for layout, result in zip(layouts, fits_nothing(layouts), strict=True)
        ]

    search = Search(gpu, SEQUENCES, evaluate)
    search.run([Degrees(dp_shard=2)])
    assert search.found == []
    reasons = {each.what: each.why for each in search.excluded}
    assert reasons["tp 1, recomputation full"] == "no"
    assert "GiB with batches of 1" in reasons["tp 1, recomputation none"]


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
