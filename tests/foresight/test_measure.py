"""The keys of hardware.toml, measured with tiny sizes on two ranks of a CPU over gloo."""

import functools
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from tests.support import process_groups
from titanplans.errors import ParallelError, RunError
from titanplans.foresight import measure as module
from titanplans.foresight.hardware import Gpu, find_gpu
from titanplans.foresight.measure import (
    MeasuredKey,
    MeasureSizes,
    TimedCall,
    as_toml,
    device_keys,
    measure,
    value_of,
)
from titanplans.foresight.time import seconds_of
from titanplans.observe.work import Work
from titanplans.parallel.mesh.process_group import Process

PRODUCT, ATTENTION = (128, 256, 512), (2, 2, 128, 32)
SIZES = MeasureSizes([PRODUCT], [ATTENTION], [2**20, 2**21], [2**18, 2**19], layers=2, repetitions=3)
KEYS = Gpu.model_fields.keys() - {"name", "torch_names"}
OF_DEVICE = {
    "memory_gib": MeasuredKey(16.5, "reported"),
    "outside_gib": MeasuredKey(0.5, "measured"),
    "processors": MeasuredKey(100, "reported"),
    "shared_memory": MeasuredKey(101376, "reported"),
}


class Measured(NamedTuple):
    """What one rank has measured, and the calls that it has timed."""

    keys: dict[str, MeasuredKey]
    calls: list[TimedCall]


def on_rank(rank: int, name: str, local_world_size: int) -> Measured:
    calls, timed = [], module.timed

    def record(*arguments):
        calls.append(timed(*arguments))
        return calls[-1]

    module.timed = record
    process = Process(torch.device("cpu"), rank, 2, rank % local_world_size, local_world_size)
    keys = measure(process, name, SIZES)
    return Measured(keys, calls)


one_machine = process_groups.module_fixture(functools.partial(on_rank, name="a CPU", local_world_size=2), 2)
two_machines = process_groups.module_fixture(
    functools.partial(on_rank, name="NVIDIA H200", local_world_size=1), 2
)


def written_and_read(folder, measured: Measured, name: str = "a CPU") -> Gpu:
    file = folder / "cluster.toml"
    file.write_text(as_toml(name, measured.keys | OF_DEVICE, "measured"))
    return find_gpu(name, file)


@pytest.mark.parametrize("name", ["one_machine", "two_machines"])
def test_the_estimate_gives_back_the_times_that_were_measured(name, tmp_path, request):
    measured = request.getfixturevalue(name)
    gpu = written_and_read(tmp_path, measured)
    # gloo on one machine is slower than any link that is assumed
    of_key = {}
    for call in measured.calls:
        work = max(call.works, key=lambda work: (work.flops, work.bytes))
        kind = work.collective is not None or (work.is_attention, work.dtype if work.flops else None)
        of_key.setdefault(kind, []).append(call)
    assert len(of_key) == 6  # bfloat16, float32, float8, attention, copies, collectives
    for calls in of_key.values():
        estimated = sum(seconds_of(work, gpu) for call in calls for work in call.works)
        assert estimated == pytest.approx(sum(call.seconds for call in calls), rel=1e-4)


def test_the_table_has_every_key_and_its_source(tmp_path, one_machine):
    assert one_machine.keys.keys() | OF_DEVICE.keys() == KEYS
    gpu = written_and_read(tmp_path, one_machine, 'a "GPU" of 80 GB')
    assert (gpu.gpus_per_node, gpu.processors, gpu.memory_gib) == (2, 100, 16.5)
    lines = (tmp_path / "cluster.toml").read_text().splitlines()
    assert max(map(len, lines)) <= 120
    for index, line in enumerate(lines[2:], 2):
        assert line.startswith("# ") or lines[index - 1].startswith("# "), line
    comments = " ".join(line.removeprefix("# ") for line in lines)
    assert "copies of 1.0 MB, 2.1 MB; median of 3 timings, on the slowest of 2 GPUs" in comments
    assert "all-gather and reduce-scatter of 262.1 kB, 524.3 kB over the GPUs of a machine" in comments


def test_a_gpu_with_a_data_sheet_keeps_its_peak(one_machine, two_machines):
    h200 = find_gpu("H200")
    assert two_machines.keys["bfloat16_tflops"].value == h200.bfloat16_tflops
    assert "data sheet, as H200" in two_machines.keys["bfloat16_tflops"].source
    assert two_machines.keys["product_efficiency"].value < 0.1  # this is a CPU
    unknown = one_machine.keys
    assert "no data sheet of a CPU" in unknown["bfloat16_tflops"].source
    assert unknown["bfloat16_tflops"].value < 100
    assert 0 < unknown["product_efficiency"].value <= 1


def test_links_and_network(one_machine, two_machines):
    """What there is only one of is taken from another GPU, and the comment says so."""
    one, two = one_machine.keys, two_machines.keys
    assert one["link_gb_s"].source.startswith("measured: ")
    assert one["network_gb_s"] == (
        50,
        "assumed as H100 in hardware.toml: not measured, since there is one machine",
    )
    assert two["link_gb_s"] == (
        450,
        "as H200 in hardware.toml: not measured, since there is one GPU a machine",
    )
    assert two["network_gb_s"].source.startswith("measured: ")
    assert "over 2 machines" in two["network_gb_s"].source
    assert 0 < two["network_gb_s"].value < 50


def test_calls_do_what_their_sizes_say(one_machine):
    tokens, inputs, outputs = PRODUCT
    works = [work for call in one_machine.calls for work in call.works]
    products = [work for work in works if work.flops and not work.is_attention]
    assert {work.flops for work in products} == {2 * tokens * inputs * outputs}
    assert [work.dtype.itemsize for work in products] == [2] * 3 + [4] * 3 + [1]
    sequences, heads, length, width = ATTENTION
    forward, backward = (work.flops for work in works if work.is_attention)
    assert forward == 2 * sequences * heads * length**2 * width
    assert backward == 2.5 * forward
    assert [work.bytes for work in works if "clone" in work.operator] == [2 * size for size in SIZES.memory]
    collectives = [work.collective for work in works if work.collective is not None]
    assert [each.operation for each in collectives] == ["all_gather", "reduce_scatter"] * 2
    assert [each.received for each in collectives] == [2**17, 2**17, 2**18, 2**18]


def test_the_value_of_a_rate():
    """Of 3 s, 1 s is for the bytes of the memory: the product takes the rest."""
    gpu = find_gpu("H100").replace(bfloat16_tflops=1.0, product_efficiency=1.0)
    product = Work("aten::mm", 10**12, 0, torch.bfloat16)
    copy = Work("aten::clone", 0, int(gpu.memory_gb_s * 0.85e9), None)
    calls = [TimedCall((product, copy), 3.0)]
    assert value_of("product_efficiency", calls, gpu) == pytest.approx(0.5)
    with pytest.raises(
        RunError, match=r"product_efficiency: what was timed took 0.5 s, .* counts 1 s besides"
    ):
        value_of("product_efficiency", [TimedCall((product, copy), 0.5)], gpu)


@pytest.mark.parametrize("local", [(1, 2), (0, 3)])
def test_machines_with_different_numbers_of_ranks_are_refused(local):
    with pytest.raises(ParallelError, match="start as many ranks on each machine"):
        measure(Process(torch.device("cpu"), 2, 4, *local), "a CPU", SIZES)


@pytest.mark.parametrize(("hip", "shared_memory"), [(None, 232448), ("7.0", 49152)])
def test_keys_that_the_device_reports(monkeypatch, hip, shared_memory):
    gib = 2**30
    properties = SimpleNamespace(total_memory=80 * gib, multi_processor_count=132)
    properties.shared_memory_per_block, properties.shared_memory_per_block_optin = 49152, 232448
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (70 * gib, 80 * gib))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 8 * gib)
    monkeypatch.setattr(module, "_slowest", lambda value, device: value)
    keys = {key: value for key, (value, _) in device_keys(torch.device("cpu")).items()}
    assert keys == {"memory_gib": 80, "outside_gib": 2, "processors": 132, "shared_memory": shared_memory}
