"""What a step on fake tensors allocates and frees, and for what."""

from datetime import timedelta

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from titanplans.observe.storages import Segment, record_storages
from titanplans.parallel import process_group
from titanplans.torch_private.dispatch import FakeTensorMode


@pytest.fixture(autouse=True)
def group():
    with process_group("cpu", timeout=timedelta(minutes=7)):
        yield


def model():
    return nn.Sequential(nn.Linear(8, 16, bias=False), nn.Linear(16, 4, bias=False))


def live_after(record):
    """Return the bytes that are allocated after each event."""
    total, result = 0, []
    for event in record.events:
        size = record.allocations[event.allocation].size
        total += -size if event.is_free else size
        result.append(total)
    return result


def test_forward_and_backward():
    with FakeTensorMode():
        layers, x = model(), torch.zeros(2, 8)
        with record_storages(layers) as record:
            loss = layers(x).sum()
            loss.backward()
    of = {(each.module, each.phase, each.shape) for each in record.allocations}
    assert ("0", "forward", (2, 16)) in of
    assert ("1", "forward", (2, 4)) in of
    assert ("1", "backward", (4, 16)) in of  # the gradient of the second weight
    assert ("0", "backward", (16, 8)) in of
    assert record.peak == max(live_after(record))


def test_a_view_is_no_allocation_and_the_last_view_frees():
    with FakeTensorMode(), record_storages(nn.Identity()) as record:
        x = torch.zeros(10)
        y = x.view(2, 5)
        del x
        assert record.live == 40
        del y
        assert record.live == 0
    assert [event.is_free for event in record.events] == [False, True]


def test_segments_and_labels():
    with FakeTensorMode(), record_storages(nn.Identity()) as record:
        record.segment = Segment(1, "forward", 0)
        x = torch.zeros(10)
        record.segment = Segment(1, "backward", 0)
        record.label([("weight", x)], "weights")
        record.label([("other", x)], "gradients")  # the first label stays
        del x
    assert [event.segment.kind for event in record.events] == ["forward", "backward"]
    (allocation,) = record.allocations
    assert (allocation.part, allocation.owner, allocation.segment.kind) == ("weights", "weight", "forward")


def test_after_the_body_nothing_is_recorded():
    with FakeTensorMode(), record_storages(nn.Identity()) as record:
        x = torch.zeros(10)
    del x
    assert [event.is_free for event in record.events] == [False]


def test_fsdp_frees_and_allocates_gathered_parameters():
    layers = model()
    for layer in layers:
        fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))
    fully_shard(layers, mesh=init_device_mesh("cpu", (1,)))
    with FakeTensorMode(allow_non_fake_inputs=True):
        layers.to_empty(device="cpu")
        with record_storages(layers) as record:
            for _ in range(2):
                layers(torch.zeros(2, 8)).sum().backward()
    gathered = [each for each in record.allocations if each.is_resized]
    assert {each.size for each in gathered} >= {8 * 16 * 4, 16 * 4 * 4}
    assert all(each.is_fsdp for each in gathered)
    assert {each.stream for each in record.allocations} > {
        0
    }  # FSDP2 copies and reduces in streams of its own


def test_the_shapes_of_dtensors_are_not_allocated():
    """DTensor finds the shape of a result with tensors of global shape."""
    mesh = init_device_mesh("cpu", (1,))
    with FakeTensorMode():
        x, y = (DTensor.from_local(torch.zeros(4, 6), mesh, [each]) for each in (Shard(0), Replicate()))
        with record_storages(nn.Identity()) as record:
            result = x * y  # noqa: F841
    assert [each.operator for each in record.allocations] == ["aten.mul.Tensor"]
