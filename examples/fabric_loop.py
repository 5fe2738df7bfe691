"""Tensor parallelism in a training loop with Lightning Fabric and its ModelParallelStrategy.

torchrun --nproc-per-node 2 -m examples.fabric_loop
"""

import torch
from lightning_fabric import Fabric
from lightning_fabric.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader

from examples.transformers_trainer import sequences, small_model
from titanplans import apply_plan
from titanplans.integrations.checkpoint import load_checkpoint, save_checkpoint
from titanplans.parallel import clip_gradients


def parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Split `model` with its plan. Fabric's strategy calls this function."""
    apply_plan(model, mesh["tensor_parallel"], loss_parallel=False)
    return model


def train(ranks: int, save: str | None = None, resume: str | None = None) -> list[tuple[float, float]]:
    """Train eight steps on batches of four sequences; return the loss and the gradient norm of each.

    Args:
        ranks: the number of tensor-parallel ranks; 1: train the unsplit model.
        save: a folder for a checkpoint after the fourth step.
        resume: the folder of such a checkpoint, from which training continues.
    """
    strategy = ModelParallelStrategy(
        parallelize_fn=parallelize, data_parallel_size=1, tensor_parallel_size=ranks
    )
    fabric = Fabric(accelerator="cpu", devices=ranks, strategy=strategy if ranks > 1 else "auto")
    fabric.launch()
    model = fabric.setup(small_model())
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-3))
    batches = list(fabric.setup_dataloaders(DataLoader(sequences(32), batch_size=4)))
    first = 0
    if resume is not None:
        load_checkpoint(resume, model.module, optimizer.optimizer)
        first = 4
    log = []
    for step, batch in enumerate(batches[first:], start=first + 1):
        loss = model(**batch).loss
        fabric.backward(loss)
        # Sums partial gradients over the ranks, which Fabric's own clipping does not do.
        norm = clip_gradients(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        log.append((loss.item(), float(norm)))
        if step == 4 and save is not None:
            save_checkpoint(save, model.module, optimizer.optimizer)
    return log


if __name__ == "__main__":
    print(train(2))
