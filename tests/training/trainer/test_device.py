"""The device of a job: its CPU threads and its memory."""

import pytest
import torch

from titanplans.parallel.mesh.process_group import available_cores, default_device_type
from titanplans.training.trainer.device import DeviceMemory, peak_resident_bytes, prepare_device

CPU = torch.device("cpu")


on_a_cpu = pytest.mark.skipif(
    default_device_type() != "cpu", reason="what a machine without accelerator gets"
)


@on_a_cpu
def test_ranks_of_a_machine_divide_its_cores(monkeypatch):
    before = torch.get_num_threads()
    try:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
        prepare_device()
        assert torch.get_num_threads() == max(1, available_cores() // 2)
    finally:
        torch.set_num_threads(before)


def test_host_memory_is_the_resident_set():
    before = peak_resident_bytes()
    block = bytearray(64 * 2**20)
    assert peak_resident_bytes() >= before
    memory = DeviceMemory(CPU)
    assert 64 * 2**20 < memory.peak().reserved < memory.total
    assert memory.name
    del block
