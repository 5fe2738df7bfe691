"""Build a job's data loaders for training and validation. Imports torchtitan."""

from dataclasses import replace

from titanplans.config import JobConfig
from titanplans.config.sections.data import DataLoader
from titanplans.training.data.loader import TextDataLoader
from titanplans.training.data.text_tokenizer import TextTokenizer
from titanplans.training.job import resolve


def training_loader(job: JobConfig, world_size: int, *, documents_apart: bool) -> TextDataLoader.Config:
    """Return the config of the training data's loader; `documents_apart`: tokens do not see tokens of other documents."""
    return replace(
        _loader(
            job,
            resolve.training_data(job),
            job.training.dataloader,
            documents_apart=documents_apart,
            infinite=True,
        ),
        global_batch_size=resolve.global_batch_size(job, resolve.data_parallel_degree(job, world_size)),
        epochs=job.training.epochs,
    )


def open_training_data(
    job: JobConfig, world_size: int, *, documents_apart: bool, as_single_rank: bool
) -> tuple[TextDataLoader, TextTokenizer]:
    """Open the training data without a process group; return the loader of data-parallel rank 0, and its tokenizer.

    With `as_single_rank` the loader yields the data of all ranks. It then reads a single source only once, but a mixture of
    several sources without end.
    """
    tokenizer = TextTokenizer.Config().build(tokenizer_path=resolve.tokenizer_path(job))
    config = training_loader(job, world_size, documents_apart=documents_apart)
    if as_single_rank and len(config.data.sources) == 1:
        config = replace(config, epochs=1)
    loader = TextDataLoader(
        config,
        dp_rank=0,
        dp_world_size=1 if as_single_rank else resolve.data_parallel_degree(job, world_size),
        tokenizer=tokenizer,
        seq_len=job.training.seq_len,
        local_batch_size=job.training.local_batch_size,
    )
    return loader, tokenizer


def validation_loader(
    job: JobConfig, data: resolve.DataSettings, world_size: int, *, documents_apart: bool
) -> TextDataLoader.Config:
    """Return the config of a loader of validation `data`. A new loader, which starts at the beginning, is built for each
    validation.
    """
    infinite = job.validation.steps != -1
    loader = _loader(job, data, job.validation.dataloader, documents_apart=documents_apart, infinite=infinite)
    batch = data.local_batch_size * resolve.data_parallel_degree(job, world_size)
    return replace(loader, global_batch_size=batch)


def _loader(
    job: JobConfig, data: resolve.DataSettings, workers: DataLoader, *, documents_apart: bool, infinite: bool
) -> TextDataLoader.Config:
    return TextDataLoader.Config(
        data=job.data.replace(sources=data.sources, documents="apart" if documents_apart else "joined"),
        infinite=infinite,
        # Also without debug.seed, a job that resumes must shuffle the documents in the same order.
        seed=job.debug.seed or 0,
        workers=workers,
    )
