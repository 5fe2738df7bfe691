"""Tensor parallelism in a training loop with Accelerate.

torchrun --nproc-per-node 2 -m examples.accelerate_loop
"""

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

from examples.transformers_trainer import sequences, small_model
from titanplans import Degrees
from titanplans.integrations.checkpoint import load_checkpoint, save_checkpoint
from titanplans.integrations.transformers import parallelism_config, split_model


def train(
    degrees: Degrees | None, save: str | None = None, resume: str | None = None
) -> list[tuple[float, float]]:
    """Train eight steps on batches of four sequences; return the loss and the gradient norm of each.

    Args:
        degrees: the degrees of parallelism; None: train the unsplit model.
        save: a folder for a checkpoint after the fourth step.
        resume: the folder of such a checkpoint, from which training continues.
    """
    model = small_model()
    if degrees is None:
        accelerator = Accelerator()
    else:
        split_model(model, degrees)
        accelerator = Accelerator(parallelism_config=parallelism_config(model))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(sequences(32), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    first = 0
    if resume is not None:
        load_checkpoint(resume, model, optimizer.optimizer)
        first, loader = 4, accelerator.skip_first_batches(loader, 4)
    log = []
    for step, batch in enumerate(loader, start=first + 1):
        loss = model(**batch).loss
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        log.append((loss.item(), float(norm)))
        if step == 4 and save is not None:
            save_checkpoint(save, model, optimizer.optimizer)
    return log


if __name__ == "__main__":
    print(train(Degrees(tp=2)))
