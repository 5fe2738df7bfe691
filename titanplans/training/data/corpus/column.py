"""The column of texts: which rows of a file are documents, and which end the job."""

from collections.abc import Iterator, Sequence

from titanplans.errors import DataError
from titanplans.training.data.corpus.pieces import PIECE_BYTES, pieces
from titanplans.training.data.reading import expect


class TextColumn:
    """Reads rows of text.

    Attributes:
        key: a JSON value on which a cached row depends, next to the files.
        features: Arrow's columns and types of a row that has been read.
        identity: what must be the same for a checkpoint to go on.
    """

    def __init__(self, name: str):
        self.name = self.key = name
        self.features = {name: "string"}
        self.identity = {"text_column": name, "piece_bytes": PIECE_BYTES}

    def columns(self, there: Sequence[str], where: str) -> list[str]:
        """Return the columns that are read of those that a file has. Raises DataError where one is missing."""
        first = self.name.partition(".")[0]
        if self.name not in there and first in there:
            return [first]  # a field in a field: "content.body"
        if self.name not in there:
            found = ", ".join(map(repr, sorted(there)))
            raise DataError(
                f"text_column = {self.name!r}: {where} has the columns {found}; name the one with the text"
            )
        return [self.name]

    def read(self, row: object, where: str) -> dict[str, str]:
        """Return a row as Arrow holds it. Raises DataError, which names `where`, for one that can't be used."""
        found = expect(row, dict, where, f"an object with {self.name!r}", "repair the file or leave it out")
        (column,) = self.columns(list(found), where)
        value = found[column]
        for key in self.name.split(".")[1:] if column != self.name else ():
            value = value.get(key) if isinstance(value, dict) else None
        where, remedy = (
            f"text_column = {self.name!r}: {where}",
            "name a column of texts, or leave such rows out",
        )
        return {self.name: expect(value, str, where, "texts", remedy)}

    def parts(self, record: dict[str, str]) -> Iterator[dict[str, str]]:
        """Cut a row into its documents, each as Arrow holds it."""
        return ({self.name: piece} for piece in pieces(self.read(record, "a row")[self.name]))

    def document(self, part: dict[str, str]) -> str:
        """Return the text of a document."""
        return part[self.name]
