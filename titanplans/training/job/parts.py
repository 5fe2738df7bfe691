"""A job's loaders of data, whose options are several sections.

Importing this imports torchtitan. `titanplans.training.job.resolve` gives unset keys their values.
"""

from dataclasses import replace

from titanplans.config import JobConfig
from titanplans.config.sections.data import DataLoader
from titanplans.training.data.loader import TextDataLoader
from titanplans.training.data.text_tokenizer import TextTokenizer
from titanplans.training.job import resolve


def training_loader(job: JobConfig, world_size: int, *, apart: bool) -> TextDataLoader.Config:
    """Return the training data's loader; `apart`: documents of a sequence do not see each other."""
    return replace(
        _loader(job, resolve.training_data(job), job.training.dataloader, apart=apart, infinite=True),
        global_batch_size=resolve.global_batch_size(job, resolve.data_parallel_degree(job, world_size)),
        epochs=job.training.epochs,
    )


def open_training_data(
    job: JobConfig, world_size: int, *, apart: bool, alone: bool
) -> tuple[TextDataLoader, TextTokenizer]:
    """Return the loader of the first of the data-parallel ranks, or of all as if it were `alone`, and its tokenizer.

    Alone it reads a single source once: a mixture by weight goes on.
    """
    tokenizer = TextTokenizer.Config().build(tokenizer_path=resolve.tokenizer_path(job))
    config = training_loader(job, world_size, apart=apart)
    if alone and len(config.data.sources) == 1:
        config = replace(config, epochs=1)
    loader = TextDataLoader(
        config,
        dp_rank=0,
        dp_world_size=1 if alone else resolve.data_parallel_degree(job, world_size),
        tokenizer=tokenizer,
        seq_len=job.training.seq_len,
        local_batch_size=job.training.local_batch_size,
    )
    return loader, tokenizer


def validation_loader(
    job: JobConfig, data: resolve.DataSettings, world_size: int, *, apart: bool
) -> TextDataLoader.Config:
    """Return the loader of validation `data`, which begins anew at each validation."""
    infinite = job.validation.steps != -1
    loader = _loader(job, data, job.validation.dataloader, apart=apart, infinite=infinite)
    batch = data.local_batch_size * resolve.data_parallel_degree(job, world_size)
    return replace(loader, global_batch_size=batch)


def _loader(
    job: JobConfig, data: resolve.DataSettings, workers: DataLoader, *, apart: bool, infinite: bool
) -> TextDataLoader.Config:
    return TextDataLoader.Config(
        data=job.data.replace(sources=data.sources, documents="apart" if apart else "joined"),
        infinite=infinite,
        # The order of the documents must not be drawn anew when a job resumes.
        seed=job.debug.seed or 0,
        workers=workers,
    )
