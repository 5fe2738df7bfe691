"""Make data sources and loaders for tests. Keyword arguments are the options of one source."""

import json
from dataclasses import replace
from functools import cache

from torchtitan.components.tokenizer import HuggingFaceTokenizer

from titanplans.config.sections.data import Corpus, Data, DataLoader, DataSource
from titanplans.training.data import checks, loader
from titanplans.training.data.corpus import sources
from titanplans.training.data.vocabulary import default_tokenizer_path


def corpus(dataset="stdlib", dataset_path=None, split="train", text_column="text"):
    return Corpus(dataset=dataset, dataset_path=dataset_path, dataset_split=split, text_column=text_column)


def open_source(*names, seed=0, chat=None, **options):
    return sources.open_source(corpus(*names, **options), seed=seed, chat=chat)


def check_dataset(*names, split="train", text_column="text", seq_len=0, **options):
    options = {"tokenizer_path": default_tokenizer_path(), **options}
    return checks.check_dataset(
        corpus(*names, split=split, text_column=text_column), seq_len=seq_len, **options
    )


def config(dataset="stdlib", dataset_path=None, split="train", text_column="text", chat=None, **options):
    source = DataSource(
        dataset=dataset, dataset_path=dataset_path, dataset_split=split, text_column=text_column,
        **({} if chat is None else {"chat": vars(chat)}),
    )  # fmt: skip
    return loader.TextDataLoader.Config(data=Data(documents="joined", sources=(source,)), **options)


def write_rows(file, rows):
    """Write a JSON line for each row; return the path."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


@cache
def tokenizer():
    """Return the tokenizer of a job that does not configure a tokenizer."""
    return HuggingFaceTokenizer(HuggingFaceTokenizer.Config(), tokenizer_path=default_tokenizer_path())


def build(data, *, seq_len, batch=8, rank=0, ranks=1, workers=0, **options):
    """Return the loader of `rank`; `batch` is the global batch size in sequences."""
    persistent = options.pop("persistent_workers", False)
    config = loader.TextDataLoader.Config(data=data, global_batch_size=batch, **options)
    return loader.TextDataLoader(
        with_workers(config, workers, persistent),
        dp_rank=rank,
        dp_world_size=ranks,
        tokenizer=tokenizer(),
        seq_len=seq_len,
        local_batch_size=batch // ranks,
    )


def with_workers(config, count, persistent=False):
    """Return `config` with `count` data workers."""
    return replace(config, workers=DataLoader(num_workers=count, persistent_workers=persistent))


def other(config, **changes):
    """Return `config` with changed options of its source, such as `dataset`, `dataset_path` and `dataset_split`."""
    (source,) = config.data.sources
    return replace(config, data=config.data.replace(sources=(source.replace(**changes),)))
