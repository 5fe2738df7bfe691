"""State dicts of DTensors that torch.save wrote: a rank's own shards load, another rank's are refused."""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from tests import zoo
from tests.support import process_groups
from tests.support.refusals import refusal_or_none
from titanplans import Degrees, FSDP2Config, ParallelManager
from titanplans.errors import ModelError
from titanplans.split.objects import gather_objects
from titanplans.torch_private.dtensor import StridedShard

SPLITS = {"tp 2": Degrees(tp=2), "fsdp 2": Degrees(), "two copies": Degrees(dp_replicate=2, dp_shard=1)}


def trained(degrees):
    """Return a split model and its optimizer after a step."""
    manager = ParallelManager(FSDP2Config(), degrees, device_type="cpu")
    model = manager.parallelize(zoo.build("qwen3", dtype=torch.float32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step(model, optimizer)
    return model, optimizer


def step(model, optimizer):
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    optimizer.step()


def weights(model):
    return [parameter.detach().to_local().clone() for parameter in model.parameters()]


def loads(rank):
    """For each split, return the errors of each rank that loads its own file, and rank 0's; check the next step."""
    folder = Path(gather_objects(tempfile.mkdtemp())[0])
    errors = {}
    for split, degrees in SPLITS.items():
        model, optimizer = trained(degrees)
        torch.save([model.state_dict(), optimizer.state_dict()], folder / f"{rank}.pt")
        step(model, optimizer)
        right = weights(model)
        dist.barrier()
        messages = []
        for name in (f"{rank}.pt", "0.pt"):
            model, optimizer = trained(degrees)
            with torch.serialization.safe_globals([StridedShard]):  # torch 2.11 does not list it
                state, moments = torch.load(folder / name, weights_only=True)
            messages.append(refusal_or_none(model.load_state_dict, state, kind=ModelError))
            optimizer.load_state_dict(moments)
            messages.append(refusal_or_none(step, model, optimizer, kind=ModelError))
            if messages[-2:] == [None, None]:
                equal = all(torch.equal(*pair) for pair in zip(weights(model), right, strict=True))
                assert equal, (split, name)
        errors[split] = gather_objects(messages)
        full = zoo.build("qwen3", dtype=torch.float32).state_dict()
        model.load_state_dict({name: tensor + 1 for name, tensor in full.items()})
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor.full_tensor(), full[name] + 1), (split, name)
    return errors


loaded = process_groups.module_fixture(loads, 2)


def test_a_rank_loads_its_own_shards_and_not_those_of_another(loaded):
    for split in ("tp 2", "fsdp 2"):
        first, second = loaded[split]
        assert first == [None] * 4
        own_weights, own_moments, others_weights, others_moments = second
        assert own_weights is None
        assert own_moments is None
        assert (
            "weight is the shard that rank 0 saved, but this is another rank: save the full tensors"
            in others_weights
        )
        assert "exp_avg of a parameter" in others_moments
        assert "load_full_optimizer_state_dict" in others_moments


def test_replicas_load_the_shards_that_one_of_them_saved(loaded):
    assert loaded["two copies"] == [[None] * 4] * 2
