"""Checks of data and checkpoints that run before a process group exists.

The loader raises the same errors, but later, on every rank. Files that are converted here, .jsonl and .parquet, the ranks
find in the cache of the `datasets` library.
"""

import itertools
from pathlib import Path

from titanplans.config.sections.data import Corpus
from titanplans.errors import DataError
from titanplans.training.data.chat.chat import ChatFormat
from titanplans.training.data.corpus.sources import open_source
from titanplans.training.data.reading import refusing
from titanplans.training.data.vocabulary import load_tokenizer

CONVERSATIONS_TO_STOP = 1000
"""Conversations in which a stop token is looked for."""
STATE_KEY = "place"
"""The one key of a loader's state."""


def check_dataset(
    of: Corpus, *, tokenizer_path: str, seq_len: int, chat: ChatFormat | None = None
) -> list[str]:
    """Refuse a data set that the loader could not use; return lines about conversations: how many are read, and whether
    none ends in a stop token.

    Of texts it has to hold the tokens of one sequence; of conversations, which `chat` reads, one.

    Raises:
        DataError: as `open_source`, or there are too few.
    """
    source, split, shown = open_source(of, chat=chat), of.dataset_split, of.dataset_path or of.dataset
    if chat is not None:
        documents = source.documents(0, 0, 1, None)
        if (first := next(documents, None)) is None:
            raise DataError(
                f"dataset = {shown!r}: holds {chat.what_is_left_out()} for dataset_split = {split!r}; give more"
            )
        notes = [] if source.summary is None else [source.summary]
        few = itertools.islice(itertools.chain([first], documents), CONVERSATIONS_TO_STOP)
        return notes if any(chat.stops_in(tokens) for _, tokens in few) else [*notes, chat.never_stops]
    tokenizer, found = load_tokenizer(tokenizer_path), 0
    for _, text in source.documents(0, 0, 1, None):
        with refusing(
            f"hf_assets_path = {tokenizer_path!r}: its tokenizer can't read the text", "give another"
        ):
            found += len(tokenizer.encode(text).ids)
        if found > seq_len:
            return []
    raise DataError(
        f"seq_len = {seq_len}: dataset = {shown!r} holds {found} tokens for dataset_split = {split!r}, "
        f"too few for one sequence of {seq_len} + 1; give more text or a smaller seq_len"
    )


def read_position(folder: str | Path) -> dict[str, str]:
    """Return the loader's state in a distributed checkpoint (`…/step-N`); {} if it has none.

    Raises:
        DataError: its loader's state is a pickle for each data-parallel rank.
    """
    import torch.distributed.checkpoint as dcp

    from titanplans.training.checkpoint.storage import CheckpointReader, Planner

    reader = CheckpointReader(str(folder))
    keys = reader.read_metadata().state_dict_metadata
    saved = {key for key in keys if key.startswith("dataloader.")}
    if saved and f"dataloader.{STATE_KEY}" not in saved:
        raise DataError(
            f"{folder}: its place in the data is a pickle for each data-parallel rank (torchtitan's, or an earlier "
            'version\'s), which is not read; start the data anew with exclude_from_loading = ["dataloader"] in [checkpoint]'
        )
    if not saved:
        return {}
    loaded = {"dataloader": {STATE_KEY: ""}}
    dcp.load(loaded, storage_reader=reader, planner=Planner(), no_dist=True)
    return loaded["dataloader"]
