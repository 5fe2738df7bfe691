"""A plan given by an import path, as a dict of torch's parallel styles, trains like the unsplit model."""

import functools
import importlib

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module

from examples.transformers_trainer import sequences, small_model
from tests.support import process_groups
from titanplans.parallel import clip_gradients


def named(path):
    """Return the plan that `path` names, as Automodel and NeMo-RL load it.

    The path names a dict, or a function that returns one.
    """
    module, _, name = path.rpartition(".")
    attribute = getattr(importlib.import_module(module), name)
    return attribute() if callable(attribute) else attribute


def losses(rank, split):
    """Return loss and gradient norm of three steps. Data-parallel ranks get different sequences."""
    model, data = small_model().double(), sequences(12)
    dp = 2 if split else 1
    if split:
        mesh = init_device_mesh("cpu", (dp, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], named("titanplans.integrations.automodel.plan"))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])  # averages gradients, as in Automodel
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    log = []
    for step in range(3):
        rows = data[step * 4 : step * 4 + 4]
        rows = rows[rank // 2 :: dp] if split else rows
        batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        loss = model(**batch).loss
        loss.backward()
        norm = clip_gradients(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach()
        torch.distributed.all_reduce(mean)
        log.append((float(mean) / torch.distributed.get_world_size(), float(norm)))
    return log


def test_losses_and_norms_are_those_of_the_unsplit_model():
    split, unsplit = (
        process_groups.run(functools.partial(losses, split=ranks > 1), ranks) for ranks in (4, 1)
    )
    # transformers computes the loss in float32, whose epsilon is 1.2e-7.
    torch.testing.assert_close(torch.tensor(split), torch.tensor(unsplit), rtol=1e-6, atol=0)
