"""Initial weights of split models: every rank's shard is bit-identical to the shard that torch makes of the full weights.

`initialize` does not communicate, so this process acts as one of four ranks after another, in a fake process group. A second
model, which has the weights of the unsplit model, is sharded by DTensor and FSDP2. tests/training/trainer/test_trainer.py
shows that jobs over real ranks begin with the same weights as one process.
"""

import math

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from tests.support import process_groups
from titanplans import modeling
from titanplans.modeling import ModelError
from titanplans.split.parameters.shards import copy_shard

# No size is a multiple of 4: over four ranks a vocabulary of 130 is split into 33, 33, 33 and 31, the bias of a rank-2
# gate into 1, 1, 0 and 0.
SIZES = dict(num_hidden_layers=2, vocab_size=130, hidden_size=32, num_heads=2, intermediate_size=54)


pytestmark = pytest.mark.usefixtures("cpu_kernels")


def _flat():
    return init_device_mesh("cpu", (4,))


def _square():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def _distribute(model, mesh, placements):
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                shard = distribute_tensor(parameter.detach(), mesh, placements(parameter), src_data_rank=None)
                module._parameters[name] = nn.Parameter(shard)
    return model


def _tp(model, mesh):
    plan = {"model.embeddings": RowwiseParallel(), "lm_head": ColwiseParallel()}
    for layer in range(len(model.model.layers)):
        prefix = f"model.layers.{layer}"
        plan |= {f"{prefix}.attn.{name}": ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj")}
        plan |= {f"{prefix}.mlp.{name}": ColwiseParallel() for name in ("gate_proj", "up_proj")}
        plan |= {f"{prefix}.attn.o_proj": RowwiseParallel(), f"{prefix}.mlp.down_proj": RowwiseParallel()}
    return parallelize_module(model, mesh, plan, src_data_rank=None)


def _fsdp(model, mesh):
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


SPLITS = {
    "replicate": (lambda m: _distribute(m, _flat(), lambda p: [Replicate()]), {"Replicate"}),
    "first dim": (lambda m: _distribute(m, _flat(), lambda p: [Shard(0)]), {"Shard"}),
    "last dim": (lambda m: _distribute(m, _flat(), lambda p: [Shard(p.dim() - 1)]), {"Shard"}),
    "one dim twice": (lambda m: _distribute(m, _square(), lambda p: [Shard(0), Shard(0)]), {"Shard"}),
    "first and last dim": (
        lambda m: _distribute(m, _square(), lambda p: [Shard(0), Shard(p.dim() - 1)]),
        {"Shard"},
    ),
    "tp": (lambda m: _tp(m, _square()["tp"]), {"Shard"}),
    "fsdp": (lambda m: _fsdp(m, _flat()), {"Shard"}),
    "hsdp": (lambda m: _fsdp(m, _square()), {"Replicate", "Shard"}),
    "fsdp x tp": (lambda m: _fsdp(_tp(m, (s := _square())["tp"]), s["dp"]), {"Shard", "_StridedShard"}),
}


def _unsplit(config):
    model = modeling.build(config).to_empty(device="cpu")
    modeling.initialize(model, seed=3)
    return model


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("name", ["gla", "transformer"])
def test_every_rank_has_the_shards_of_torch(name, split):
    apply, placements = SPLITS[split]
    config = modeling.load_config(name, "debug", **SIZES)
    placements_found = set()
    for rank in range(4):
        with process_groups.fake_group(4, rank):
            expected = dict(apply(_unsplit(config)).named_parameters())
            model = apply(modeling.build(config)).to_empty(device="cpu")
            for parameter in model.parameters():
                parameter.data.fill_(math.nan)
            modeling.initialize(model, seed=3)
            for parameter_name, parameter in model.named_parameters():
                value, reference = parameter.detach(), expected[parameter_name].detach()
                if isinstance(value, DTensor):
                    placements_found.update(type(placement).__name__ for placement in value.placements)
                    assert value.placements == reference.placements
                    value, reference = value.to_local(), reference.to_local()
                assert torch.equal(value, reference), (rank, parameter_name)
    assert placements_found == placements, "the case has the placements that it should test"


def test_tied_shards_are_one_parameter():
    config = modeling.load_config("gla", "debug", tie_word_embeddings=True, **SIZES)
    with process_groups.fake_group(4, 1):
        model = SPLITS["fsdp x tp"][0](modeling.build(config)).to_empty(device="cpu")
        modeling.initialize(model, seed=3)
        weight = model.lm_head._parameters["weight"]
        assert weight is model.model.embeddings._parameters["weight"]
        assert any(isinstance(placement, _StridedShard) for placement in weight.placements)


def test_one_module_at_a_time_is_in_memory(monkeypatch):
    config = modeling.load_config("gla", "debug")
    layer = sum(p.numel() for p in modeling.build(config).model.layers[0].parameters())
    embedding = config.vocab_size * config.hidden_size
    sizes = []
    original = modeling.initialize.__globals__["Reference"].values

    def values(self, module):
        answer = original(self, module)
        in_memory = sum(p.numel() for p in self.model.parameters() if not p.is_meta)
        sizes.append(in_memory + sum(value.numel() for value in answer.values()))
        return answer

    monkeypatch.setattr(modeling.initialize.__globals__["Reference"], "values", values)
    _unsplit(config)
    assert max(sizes) == max(layer, embedding)


@pytest.mark.parametrize(
    ("placements", "message"),
    [
        ([Partial(), Replicate()], "placement P"),
        ([_StridedShard(0, split_factor=4), Shard(0)], "4 earlier shards.*make 2"),
    ],
)
def test_a_placement_without_a_known_slice_is_refused(placements, message):
    with process_groups.fake_group(4, 0):
        destination = DTensor.from_local(
            torch.zeros(2, 4), _square(), placements, shape=(8, 4), stride=(4, 1)
        )
        with pytest.raises(ModelError, match=rf"^some\.weight: .*{message}"):
            copy_shard(destination, torch.zeros(8, 4), name="some.weight")
