"""The search for layouts finds what trying all of them finds, and predicts nearly what a forecast gives."""

import itertools
import statistics
from concurrent.futures import Future

import pytest

from tests import zoo
from tests.support import rehearsals
from titanplans.errors import ParallelError
from titanplans.foresight.bounds import Bounds, Kind
from titanplans.foresight.forecast import forecast_of, sample_of
from titanplans.foresight.hardware import find_gpu
from titanplans.foresight.layouts import MODES, JobLayout
from titanplans.foresight.predict import PipelineShape
from titanplans.foresight.search import WORTHWHILE, Search
from titanplans.plan.degrees import Degrees

GPUS = 2
LLAMA = {
    "options": False,
    "hidden_size": 128,
    "intermediate_size": 256,
    "vocab_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
MIXTURE = {
    "options": False,
    "hidden_size": 128,
    "moe_intermediate_size": 256,
    "num_experts": 8,
    "vocab_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
# Products take most of the time, as in a model of a size that is trained, and Python none.
GPU = find_gpu("H100").replace(outside_gib=0.0, host_us=0.0, bfloat16_tflops=1.0)


class Rehearsals:
    """Rehearses layouts of a tiny model, and lists the layouts."""

    def __init__(self, folder, gpu=GPU, gpus=GPUS, layers=5, model=("llama", LLAMA)):
        rehearsals.install()
        name, options = model
        self.config = zoo.config(name, **options, num_hidden_layers=layers)
        self.folder, self.gpu, self.gpus, self.layouts = folder, gpu, gpus, []

    def sample(self, layout):
        return self.run(sample_of, layout)

    def forecast(self, layout):
        return self.run(forecast_of, layout)

    def run(self, rehearse, layout):
        self.layouts.append(layout)
        result = Future()
        result.set_result(rehearse(self.job(layout), self.config, self.gpus, self.gpu))
        return result

    def forecasts(self, layouts):
        return [self.forecast(layout).result() for layout in layouts]

    def job(self, layout):
        options = ("training.seq_len=2048", "loss.fused=false", *layout.options())
        return rehearsals.job(self.folder, *options)


def pipeline(folder, starts, *options):
    return PipelineShape(rehearsals.job(folder, *options), len(starts), starts)


def test_the_fastest_layout_that_fits_is_found(tmp_path):
    # Links that make tensor parallelism slow, and memory for half of the layouts.
    gpu, sequences = GPU.replace(link_gb_s=10.0), 2
    degrees = [Degrees(dp_shard=2), Degrees(dp_shard=1, tp=2)]
    layouts = [
        JobLayout(each, mode, batch, sequences)
        for each, mode in itertools.product(degrees, MODES)
        for batch in (1, 2)
        if sequences % (batch * each.dp_shard) == 0
    ]
    reserved = (each.reserved(False) for each in Rehearsals(tmp_path, gpu).forecasts(layouts))
    gpu = gpu.replace(memory_gib=statistics.median_low(reserved) / 2**30)
    every = zip(layouts, Rehearsals(tmp_path, gpu).forecasts(layouts), strict=True)
    fitting = {layout: each.seconds for layout, each in every if each.retries(False) == 0}
    assert len(fitting) < len(layouts)

    search = Search(gpu, sequences, Rehearsals(tmp_path, gpu), count=2)
    search.run(degrees)
    first, second = search.found[:2]
    assert {first.layout, second.layout} <= fitting.keys()
    assert first.seconds == pytest.approx(fitting[first.layout], rel=0.01)
    assert first.seconds <= 1.03 * min(fitting.values())


def test_layouts_that_can_not_be_among_the_best_are_not_rehearsed(tmp_path):
    gpu = GPU.replace(link_gb_s=10.0)
    tried = Rehearsals(tmp_path, gpu)
    search = Search(gpu, 2, tried, {2: pipeline(tmp_path, (0, 3))}, count=1)
    search.run([Degrees(dp_shard=2), Degrees(dp_shard=1, tp=2), Degrees(dp_shard=1, pp=2)])
    assert str(search.found[0].layout.degrees) == "tp 1"
    assert not any(layout.degrees.pp > 1 for layout in tried.layouts)
    refused = {each.what: each.why for each in search.excluded}
    assert "slower: its collectives are in line" in refused["tp 2"]
    assert "at least" in refused["tp 1, pp 2"] or "about" in refused["tp 1, pp 2"]


def test_what_can_not_run_is_refused_with_the_reason(tmp_path):
    class Refusing(Rehearsals):
        def sample(self, layout):
            result = Future()
            result.set_exception(ParallelError("no"))
            return result if layout.mode == "full" else super().sample(layout)

    search = Search(GPU, 2, Refusing(tmp_path))
    search.run([Degrees(dp_shard=2)])
    assert {each.what: each.why for each in search.excluded} == {"tp 1, recomputation full": "no"}
    assert {each.layout.mode for each in search.found} == {"none", "selective"}


def test_what_does_not_fit_is_refused_with_the_reason(tmp_path):
    gpu = GPU.replace(memory_gib=0.001)
    search = Search(gpu, 2, Rehearsals(tmp_path, gpu), {2: pipeline(tmp_path, (0, 3))})
    search.run([Degrees(dp_shard=2), Degrees(dp_shard=1, tp=2), Degrees(dp_shard=1, pp=2)])
    assert search.found == []
    reasons = {each.what: each.why for each in search.excluded}
    assert "GiB with batches of 1" in reasons["tp 1, recomputation none"]
    assert "GiB on the first stage" in reasons["tp 1, pp 2, recomputation none"]
    assert "one sequence needs too much memory" in reasons["tp 1"]


def test_a_batch_that_does_not_fit_is_replaced_by_a_smaller_one(tmp_path):
    degrees = Degrees(dp_shard=2)
    small, large = (JobLayout(degrees, "none", batch, 8) for batch in (1, 2))
    exact = Rehearsals(tmp_path)
    of_small, of_large = exact.forecasts([small.with_batches(2), large.with_batches(2)])
    # The prediction from one sequence is that both fit.
    sample = exact.sample(small.with_batches(1)).result()
    capacity = max(of_large.reserved(False) - 1, sample.memory(2))
    assert of_small.reserved(False) < capacity < of_large.reserved(False)
    gpu = GPU.replace(memory_gib=capacity / 2**30)
    search = Search(gpu, 8, Rehearsals(tmp_path, gpu), count=1)
    search.run([degrees])
    assert {each.layout.batch for each in search.found if each.layout.mode == "none"} == {1}


@pytest.mark.parametrize(
    ("schedule", "starts", "stages"),
    [("1F1B", (0, 4), 2), ("1F1B", (0, 2, 4, 6), 4), ("GPipe", (0, 5), 2)],
)
def test_pipelines_are_predicted_from_a_sample_without(tmp_path, schedule, starts, stages):
    option = f"parallelism.pipeline_parallel_schedule={schedule}"
    exact = Rehearsals(tmp_path, gpus=stages, layers=8)
    sample = exact.sample(JobLayout(Degrees(dp_shard=stages), "none", 1, stages)).result()
    degrees = Degrees(dp_shard=1, pp=stages)
    layout = JobLayout(degrees, "none", 4 * stages, 4 * stages)
    job = exact.job(layout)
    options = {
        "pipeline_parallel_schedule": schedule,
        "pipeline_parallel_split_points": tuple(f"model.layers.{start}" for start in starts[1:]),
    }
    job = job.model_copy(update={"parallelism": job.parallelism.replace(**options)})
    forecast = forecast_of(job, exact.config, stages, GPU)
    of_job = pipeline(tmp_path, starts, option)
    # Sending takes no time in a forecast, and neither does FSDP, which has one rank.
    assert sample.seconds(layout, of_job) == pytest.approx(forecast.seconds, rel=0.05)
    first = forecast.ranks[0].memory
    # GPipe keeps the activations of all micro batches, and 1F1B those of as many as there are stages.
    assert (
        0.5 * first.live / (4 if schedule == "GPipe" else 1)
        < sample.memory_of_stage(degrees, of_job)
        < 1.1 * first.live
    )


def test_no_layout_is_faster_than_its_bound(tmp_path):
    gpu = GPU.replace(link_gb_s=1.0)
    exact = Rehearsals(tmp_path, gpu, gpus=4, layers=8)
    pipelines = {2: pipeline(tmp_path, (0, 4)), 4: pipeline(tmp_path, (0, 2, 4, 6))}
    bounds, sequences = Bounds(gpu, 16, pipelines), 16
    for kind in (Kind(1, 1, 1, "none"), Kind(2, 1, 1, "none"), Kind(1, 2, 1, "none")):
        ranks = 4 // (kind.tp * kind.cp)
        layout = JobLayout(Degrees(dp_shard=ranks, tp=kind.tp, cp=kind.cp), kind.mode, 1, ranks)
        sample = exact.sample(layout).result()
        bounds.learn(kind, sample)
    degrees = [
        Degrees(dp_shard=4),
        Degrees(dp_shard=2, tp=2),
        Degrees(dp_shard=1, tp=4),
        Degrees(dp_shard=1, tp=2, cp=2),
        Degrees(dp_shard=1, cp=4),
        Degrees(dp_shard=2, pp=2),
        Degrees(dp_shard=1, pp=4),
        Degrees(dp_shard=1, tp=2, pp=2),
    ]
    layouts = [
        JobLayout(each, mode, 4 if each.pp == 1 else 2 * each.pp, sequences)
        for each, mode in zip(degrees, itertools.cycle(("none", "full")), strict=False)
    ]
    for layout, forecast in zip(layouts, exact.forecasts(layouts), strict=True):
        each = layout.degrees
        bound = bounds.seconds(each, Kind(each.tp, each.cp, each.ep, layout.mode))
        assert 0.3 * forecast.seconds < bound <= forecast.seconds, layout


def test_no_layout_of_experts_is_faster_than_its_bound(tmp_path):
    gpu = GPU.replace(gpus_per_node=2, link_gb_s=10.0, network_gb_s=2.0)
    exact = Rehearsals(tmp_path, gpu, gpus=4, model=("qwen3_moe", MIXTURE))
    bounds, sequences = Bounds(gpu, 16, {}), 16
    for kind in (Kind(1, 1, 1, "none"), Kind(1, 1, 2, "none")):
        sample = exact.sample(JobLayout(Degrees(dp_shard=4, ep=kind.ep), kind.mode, 1, 4)).result()
        bounds.learn(kind, sample)
    degrees = [
        Degrees(dp_shard=4),
        Degrees(dp_shard=4, ep=2),
        Degrees(dp_shard=4, ep=4),
        Degrees(dp_shard=2, cp=2, ep=4),
        Degrees(dp_shard=2, tp=2, ep=2),
    ]
    modes = itertools.cycle(("none", "full"))
    layouts = [JobLayout(each, mode, 4, sequences) for each, mode in zip(degrees, modes, strict=False)]
    for layout, forecast in zip(layouts, exact.forecasts(layouts), strict=True):
        each = layout.degrees
        bound = bounds.seconds(each, Kind(each.tp, each.cp, each.ep, layout.mode))
        assert 0.3 * forecast.seconds < bound <= forecast.seconds, layout


def test_what_is_much_slower_than_the_best_is_not_looked_for(tmp_path):
    gpu = GPU.replace(link_gb_s=1.0)
    tried = Rehearsals(tmp_path, gpu)
    search = Search(gpu, 4, tried, count=5)
    search.run([Degrees(dp_shard=2), Degrees(dp_shard=1, tp=2)])
    assert len(search.found) < 5
    assert max(each.seconds for each in search.found) <= WORTHWHILE * search.found[0].seconds
    assert {str(each.layout.degrees) for each in search.found} == {"tp 1"}
    assert "slower" in {each.what: each.why for each in search.excluded}["tp 2"]


def test_bounds_refuse_what_does_not_fit(tmp_path):
    exact = Rehearsals(tmp_path)
    sample = exact.sample(JobLayout(Degrees(dp_shard=2), "none", 1, 2)).result()
    small = GPU.replace(memory_gib=0.5 * sample.live / 2**30)
    bounds = Bounds(small, 2, {})
    assert bounds.seconds(Degrees(dp_shard=2), Kind(1, 1, 1, "none")) == 0
    bounds.learn(Kind(1, 1, 1, "none"), sample)
    assert bounds.seconds(Degrees(dp_shard=2), Kind(1, 1, 1, "none")) == float("inf")
    assert bounds.seconds(Degrees(dp_shard=2), Kind(1, 1, 1, "full")) < float("inf")
