"""Initial weights on four real ranks: what they hold makes up, bitwise, the weights of one process."""

import math

import pytest
import torch
import worlds
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import LlamaConfig

from titanplans import modeling

# A model of transformers, because FLA takes each of four processes many seconds to import. 130 rows of
# vocabulary over four ranks are 33, 33, 33 and 31; over 2 x 2 they are 65 twice, and 33 and 32 of each.
CONFIG = LlamaConfig(
    vocab_size=130, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=54
)


def _tp(model, mesh):
    plan = {"model.embed_tokens": RowwiseParallel(), "lm_head": ColwiseParallel()}
    for layer in ("model.layers.0", "model.layers.1"):
        plan |= {f"{layer}.self_attn.{name}": ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj")}
        plan |= {f"{layer}.mlp.{name}": ColwiseParallel() for name in ("gate_proj", "up_proj")}
        plan |= {f"{layer}.self_attn.o_proj": RowwiseParallel(), f"{layer}.mlp.down_proj": RowwiseParallel()}
    return parallelize_module(model, mesh, plan)


def _fsdp(model, mesh):
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _initialized(model):
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.fill_(math.nan)
    modeling.initialize(model, seed=11)
    return dict(model.named_parameters())


def _differing(rank):
    """Case -> names of parameters that differ from those of one process."""
    flat, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    splits = {
        "tp 4": lambda m: _tp(m, flat),
        "fsdp 4": lambda m: _fsdp(m, flat),
        "fsdp 2 x tp 2": lambda m: _fsdp(_tp(m, square["tp"]), square["dp"]),
    }
    torch.manual_seed(rank)  # ranks may well differ in it
    expected = _initialized(modeling.build(CONFIG))
    differing = {}
    for case, split in splits.items():
        differing[case] = []
        for name, parameter in _initialized(split(modeling.build(CONFIG))).items():
            value = parameter.detach()
            value = value.full_tensor() if isinstance(value, DTensor) else value
            if not torch.equal(value, expected[name]):
                differing[case].append(name)
    return differing


@pytest.fixture(scope="module")
def differing():
    return worlds.run(_differing, ranks=4)


@pytest.mark.parametrize("case", ["tp 4", "fsdp 4", "fsdp 2 x tp 2"])
def test_the_whole_is_that_of_one_process(differing, case):
    assert differing[case] == []
