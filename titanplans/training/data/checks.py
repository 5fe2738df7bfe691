"""Check the data before a process group exists. The loader would raise the same errors later, on every rank.

The checks also convert .jsonl and .parquet files, so the ranks find these in the cache of the `datasets` library.
"""

import itertools
from pathlib import Path

from titanplans.config.sections.data import Corpus
from titanplans.errors import DataError
from titanplans.training.data.chat.chat import ChatFormat
from titanplans.training.data.corpus.sources import open_source
from titanplans.training.data.data_errors import as_data_error
from titanplans.training.data.vocabulary import load_tokenizer

CONVERSATIONS_TO_STOP = 1000
"""The number of conversations that are searched for a stop token."""
STATE_KEY = "place"
"""The only key of a loader's state, in checkpoints."""


def check_dataset(
    corpus: Corpus, *, tokenizer_path: str, seq_len: int, chat: ChatFormat | None = None
) -> list[str]:
    """Refuse a data set that the loader could not use.

    Texts must have enough tokens for at least one sequence; with `chat`, there must be at least one conversation.

    Returns:
        Lines about conversations: how many are used, and a warning if no answer ends in a stop token.

    Raises:
        DataError: there is too little data, or `open_source` refuses the data.
    """
    source, split = open_source(corpus, chat=chat), corpus.dataset_split
    shown = corpus.dataset_path or corpus.dataset
    if chat is not None:
        documents = source.documents(0, 0, 1, None)
        if (first := next(documents, None)) is None:
            raise DataError(
                f"dataset = {shown!r}: holds {chat.describe_exclusions()} for dataset_split = {split!r}; give more"
            )
        notes = [] if source.summary is None else [source.summary]
        first_ones = itertools.islice(itertools.chain([first], documents), CONVERSATIONS_TO_STOP)
        has_stop = any(chat.stops_in(tokens) for _, tokens in first_ones)
        return notes if has_stop else [*notes, chat.missing_stop_note]
    tokenizer, count = load_tokenizer(tokenizer_path), 0
    for _, text in source.documents(0, 0, 1, None):
        with as_data_error(
            f"hf_assets_path = {tokenizer_path!r}: its tokenizer can't read the text", "give another"
        ):
            count += len(tokenizer.encode(text).ids)
        if count > seq_len:
            return []
    raise DataError(
        f"seq_len = {seq_len}: dataset = {shown!r} holds {count} tokens for dataset_split = {split!r}, "
        f"too few for one sequence of {seq_len} + 1; give more text or a smaller seq_len"
    )


def read_position(folder: str | Path) -> dict[str, str]:
    """Return the loader's state in a distributed checkpoint (`…/step-N`); {} if it has none.

    Raises:
        DataError: the state is in torchtitan's form, a pickle for each data-parallel rank.
    """
    import torch.distributed.checkpoint as dcp

    from titanplans.training.checkpoint.storage import CheckpointReader, Planner

    reader = CheckpointReader(str(folder))
    keys = reader.read_metadata().state_dict_metadata
    saved = {key for key in keys if key.startswith("dataloader.")}
    if saved and f"dataloader.{STATE_KEY}" not in saved:
        raise DataError(
            f"{folder}: its position in the data is a pickle for each data-parallel rank, as torchtitan or an earlier "
            'version saves it, which is not supported; start the data anew with exclude_from_loading = ["dataloader"] in '
            "[checkpoint]"
        )
    if not saved:
        return {}
    loaded = {"dataloader": {STATE_KEY: ""}}
    dcp.load(loaded, storage_reader=reader, planner=Planner(), no_dist=True)
    return loaded["dataloader"]
