"""The work to parallelise a model does not grow with the number of ranks: groups and operators are counted."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.fsdp._fully_shard._fsdp_common import _chunk_with_empty

from tests.support.operator_counts import OperatorCounts
from titanplans import apply_plan, modeling
from titanplans.parallel import Degrees, FSDP2Config, Mesh, parallelize
from titanplans.parallel.fsdp.construction import Chunks, independent_of_world
from titanplans.proof.ranks.fake import fake_ranks

TP = 8
WORLDS = (64, 512, 4096)


def build():
    return modeling.build(modeling.load_config("llama", "debug"))


@pytest.fixture(scope="module")
def counted():
    """Return, for each world size, the groups of this rank, and the operators of `apply_plan` alone and of
    `parallelize`."""
    by_world = {}
    for world in WORLDS:
        with fake_ranks(world):
            before = len(distributed_c10d._world.pg_map)
            mesh = Mesh(Degrees(tp=TP), "cpu")
            groups = len(distributed_c10d._world.pg_map) - before
            assert dist.get_world_size() == world
            with OperatorCounts() as plan:
                apply_plan(build(), mesh.get_mesh("tp"))
            model = build()
            with OperatorCounts() as everything:
                parallelize(model, parallel_dims=mesh, config=FSDP2Config())
            groups_after = len(distributed_c10d._world.pg_map) - before
        by_world[world] = groups, groups_after, plan.counts, everything.counts
    return by_world


def test_a_rank_joins_as_many_groups_in_every_world(counted):
    groups = {counts[0] for counts in counted.values()}
    assert len(groups) == 1
    # One group for each dimension larger than 1, and one group that all dimensions of size 1 use.
    assert groups == {3}


def test_parallelising_makes_no_group_and_communicates_nothing(counted):
    for groups, groups_after, _, operators in counted.values():
        assert groups_after == groups
        assert not [name for name in operators if "c10d" in name]
        assert operators  # the counter works


def test_sharding_costs_the_same_in_every_world(counted):
    """Without titanplans, FSDP2 makes the shards of all ranks for every parameter."""
    first, *others = (counts[3] for counts in counted.values())
    assert first.total() > 0
    assert all(other == first for other in others)


@pytest.mark.parametrize("dim", [0, 1])
def test_shards_are_those_of_torch(dim):
    # Sizes that divide, that leave a shorter last shard, and that leave ranks without one.
    for size, ranks in itertools.product(range(1, 14), range(1, 14)):
        tensor = torch.arange(size * 3).view(size, 3) if dim == 0 else torch.arange(size * 3).view(3, size)
        ours, torchs = Chunks(tensor, ranks, dim), _chunk_with_empty(tensor, ranks, dim)
        assert len(ours) == len(torchs) == ranks
        assert all(a.shape == b.shape and a.equal(b) for a, b in zip(ours, torchs, strict=True))


def test_torch_is_restored_after_an_error():
    before = DeviceMesh._concatenate, _fsdp_param._chunk_with_empty
    with independent_of_world():
        assert _fsdp_param._chunk_with_empty is not before[1]
    with pytest.raises(KeyError), independent_of_world():
        raise KeyError
    assert (DeviceMesh._concatenate, _fsdp_param._chunk_with_empty) == before


def test_a_plan_costs_the_same_in_every_world(counted):
    first, *others = (counts[2] for counts in counted.values())
    assert first.total() > 0
    assert all(other == first for other in others)
