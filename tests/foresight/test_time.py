"""The time of a step, against numbers that follow from the sizes of its tensors and from the GPU."""

import pytest

from tests import zoo
from tests.support import rehearsals
from titanplans import modeling
from titanplans.foresight.forecast import forecast_of
from titanplans.foresight.hardware import find_gpu
from titanplans.foresight.time import COPIES, FOR_FSDP, FOR_HOST, PRODUCTS, UPDATE, seconds_of
from titanplans.observe.operators import Collective
from titanplans.observe.work import Work

FREE = {"memory_gb_s": 1e12, "link_gb_s": 1e12, "network_gb_s": 1e12, "host_us": 0.0}
"""Nothing but arithmetic takes time."""
LLAMA = {"options": False, "num_hidden_layers": 6, "hidden_size": 256, "intermediate_size": 512}
LLAMA |= {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 1024}


def forecast(folder, *options, ranks=2, gpu=None, **sizes):
    rehearsals.install()
    job = rehearsals.job(folder, "training.seq_len=512", *options)
    gpu = find_gpu("H100").replace(**(FREE | (gpu or {})))
    return forecast_of(job, zoo.config("llama", **(LLAMA | sizes)), ranks, gpu)


def parts(folder, *options, **arguments):
    return forecast(folder, *options, **arguments).ranks[0].time.parts


def test_products_take_the_time_of_their_arithmetic(tmp_path):
    gpu = {"bfloat16_tflops": 1.0, "product_efficiency": 0.5}
    result = forecast(tmp_path, "training.mixed_precision_param=bfloat16", gpu=gpu)
    model = modeling.build(zoo.config("llama", **LLAMA))
    products = sum(p.numel() for name, p in model.named_parameters() if "embed" not in name and p.ndim == 2)
    expected = 6 * products * 2 * 512 / (1e12 * 0.5)
    assert result.ranks[0].time.parts[PRODUCTS] == pytest.approx(expected, rel=1e-3)
    assert result.sequences == 2 * 2
    assert result.tokens_per_second == pytest.approx(2 * 512 / result.seconds)


def test_recomputation_repeats_the_forward_of_the_blocks(tmp_path):
    plain, full = (
        parts(tmp_path, f"activation_checkpoint.mode={mode}", gpu={"bfloat16_tflops": 1.0})[PRODUCTS]
        for mode in ("none", "full")
    )
    assert 1.2 < full / plain < 4 / 3  # the last product of a block is not needed again


def test_tensor_parallelism_halves_the_products_and_communicates_in_line(tmp_path):
    whole = parts(tmp_path, gpu={"bfloat16_tflops": 1.0})
    split = parts(
        tmp_path,
        "parallelism.tensor_parallel_degree=2",
        gpu={"bfloat16_tflops": 1.0, "link_gb_s": 1.0},
    )
    assert split[PRODUCTS] == pytest.approx(whole[PRODUCTS] / 2, rel=0.01)
    gathered = 2 * 512 * LLAMA["hidden_size"] * 2 / 2 / 0.8e9
    # two gathers in the forward of each block, and one before the head
    assert split["all-gather over 2 GPUs"] > 13 * gathered


@pytest.mark.parametrize(("network", "waits"), [(1e12, False), (0.001, True)])
def test_collectives_of_fsdp_overlap_unless_they_take_longer(tmp_path, network, waits):
    gpu = {"bfloat16_tflops": 1.0, "gpus_per_node": 1, "network_gb_s": network}
    rank = forecast(tmp_path, gpu=gpu).ranks[0].time
    assert (rank.parts.get(FOR_FSDP, 0) > 0.5 * rank.seconds) == waits
    if waits:
        assert rank.seconds < rank.fsdp + sum(v for k, v in rank.parts.items() if k != FOR_FSDP)
    else:
        assert rank.parts.get(FOR_FSDP, 0) < 0.05 * rank.seconds


def test_gathered_parameters_are_copied_out_for_the_forward_and_for_the_backward(tmp_path):
    copies = parts(tmp_path, gpu={"memory_gb_s": 1.0})[COPIES]
    model = modeling.build(zoo.config("llama", **LLAMA))
    gathered = 4 * sum(p.numel() for p in model.parameters())  # bytes in float32
    # Each copy reads and writes them. The gradients are copied in, too.
    assert copies > 2 * 2 * gathered / 0.85e9


def test_a_slow_host_is_waited_for(tmp_path):
    rank = forecast(tmp_path, gpu={"host_us": 1000.0}).ranks[0].time
    assert rank.parts[FOR_HOST] > 0.98 * rank.seconds
    assert rank.seconds > 300 * 1e-3  # more than 300 operators


def test_each_accumulated_batch_takes_as_long(tmp_path):
    seconds = [
        forecast(tmp_path, f"training.gradient_accumulation_steps={n}", gpu={"bfloat16_tflops": 1.0}).seconds
        for n in (4, 6, 8)
    ]
    assert seconds[2] - seconds[1] == pytest.approx(seconds[1] - seconds[0])
    assert seconds[2] == pytest.approx(2 * seconds[0], rel=0.05)


def test_the_update_covers_blocks_that_are_not_rehearsed(tmp_path):
    few, many = (
        parts(tmp_path, gpu={"memory_gb_s": 1.0}, num_hidden_layers=layers, vocab_size=8)[UPDATE]
        for layers in (10, 20)
    )
    assert many == pytest.approx(2 * few, rel=0.02)


def test_a_pipeline_idles_by_the_number_of_stages_and_micro_batches(tmp_path):
    options = ("parallelism.pipeline_parallel_degree=2", "training.local_batch_size=4")
    schedule = "parallelism.pipeline_parallel_schedule=GPipe"
    result = forecast(
        tmp_path,
        *options,
        schedule,
        gpu={"bfloat16_tflops": 1.0, "attention_efficiency": 1e3},
        num_hidden_layers=8,
        vocab_size=8,
    )
    assert len(result.ranks) == 2
    assert result.idle == pytest.approx(1 / (4 + 1), abs=0.03)


def test_links_and_networks():
    gpu = find_gpu("H100").replace(gpus_per_node=2, link_gb_s=100.0, network_gb_s=10.0)

    def seconds(*group, operation="all_gather"):
        collective = Collective(operation, None, group, 10**9, 10**9, False)
        return seconds_of(Work("c10d::_allgather_base_", 0, 0, None, collective), gpu)

    assert seconds(0, 1) == pytest.approx(10**9 / 2 / 80e9, rel=0.01)
    assert seconds(0, 2) == pytest.approx(10**9 / 2 / 8e9, rel=0.01)
    # Two GPUs of a node share the traffic of a ring over two nodes.
    assert seconds(0, 1, 2, 3) == pytest.approx(10**9 * 3 / 4 / 16e9, rel=0.01)
    # In an all-to-all a rank receives half of its tensor from the other node, through its own adapter.
    assert seconds(0, 1, 2, 3, operation="all_to_all") == pytest.approx(10**9 / 2 / 8e9, rel=0.01)
    assert seconds(0, 1, operation="all_to_all") == pytest.approx(10**9 / 2 / 80e9, rel=0.01)
