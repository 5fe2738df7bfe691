"""Text in, batches out: corpora, the committed tokenizer, packing, and a loader that resumes exactly.

Exported names import no torchtitan, so that a job can be checked before its device is chosen
(`training/device.py` comes before the first torchtitan import). The loader is
`titanplans.training.data.loader.TextDataLoader`.
"""

from titanplans.errors import DataError
from titanplans.training.data.chat.chat import ChatFormat
from titanplans.training.data.checks import check_dataset, read_place
from titanplans.training.data.vocabulary import check_tokenizer, default_tokenizer_path

__all__ = [
    "ChatFormat",
    "DataError",
    "check_dataset",
    "check_tokenizer",
    "default_tokenizer_path",
    "read_place",
]
