"""The column of texts: which rows of a file are documents, and which end the job.

Arrow's own columns of texts are taken as they are; what else a file holds is looked at value by value.
"""

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from titanplans.errors import DataError
from titanplans.training.data.corpus.pieces import PIECE_BYTES, pieces

if TYPE_CHECKING:
    import pyarrow


class TextColumn:
    """Reads rows of text, see `titanplans.training.data.corpus.rows.RowFormat`."""

    may_be_columns = True

    def __init__(self, name: str):
        self.name = self.key = name
        self.features = {name: "string"}
        self.identity = {"text_column": name, "piece_bytes": PIECE_BYTES}

    def columns(self, there: Sequence[str], where: str) -> list[str]:
        """See RowFormat."""
        first = self.name.partition(".")[0]
        if self.name not in there and first in there:
            return [first]  # a field in a field: "content.body"
        if self.name not in there:
            found = ", ".join(map(repr, sorted(there)))
            raise DataError(
                f"text_column = {self.name!r}: {where} has the columns {found}; name the one with the text"
            )
        return [self.name]

    def read(self, row: object, where: str) -> dict[str, Any]:
        """See RowFormat."""
        if not isinstance(row, dict):
            raise DataError(
                f"{where} holds a value of type {type(row).__name__} where there should be an object with "
                f"{self.name!r}; repair the file or leave it out"
            )
        (column,) = self.columns(list(row), where)
        return {self.name: self._text(self._inside(column, row[column]), where)}

    def _inside(self, column: str, value: Any) -> Any:
        """Return what the field of a column's value holds; None if it is not there."""
        for key in self.name.split(".")[1:] if column != self.name else ():
            value = value.get(key) if isinstance(value, dict) else None
        return value

    def table(self, table: "pyarrow.Table | pyarrow.RecordBatch", file: str, before: int) -> "pyarrow.Table":
        """See RowFormat."""
        import pyarrow

        (name,) = self.columns(table.schema.names, file)
        column = table.column(name)
        texts = name == self.name and str(column.type) in ("string", "large_string")
        if column.null_count or not texts or not _is_utf8(column):
            column = [
                self._scalar(name, value, f"{file}, row {number}")
                for number, value in enumerate(column, before + 1)
            ]
        return pyarrow.table({self.name: column})

    def parts(self, record: dict[str, Any]) -> Iterator[dict[str, str]]:
        """See RowFormat."""
        return ({self.name: piece} for piece in pieces(self._text(record[self.name], "a row")))

    def document(self, part: dict[str, str]) -> str:
        """See RowFormat."""
        return part[self.name]

    def _scalar(self, name: str, scalar: Any, where: str) -> str:
        try:
            value = scalar.as_py()
        except UnicodeDecodeError as error:
            raise DataError(
                f"{where} is not UTF-8 ({error.reason} at its byte {error.start}); repair the file or leave it out"
            ) from error
        if "json" in str(scalar.type):  # of a column with rows of several types
            value = json.loads(value)
        return self._text(self._inside(name, value), where)

    def _text(self, value: object, where: str) -> str:
        if not isinstance(value, str):
            raise self._none(
                where, "no value" if value is None else f"a value of type {type(value).__name__}"
            )
        try:
            value.encode()
        except UnicodeEncodeError:
            raise self._none(where, "an unpaired surrogate") from None
        return value

    def _none(self, where: str, found: str) -> DataError:
        return DataError(
            f"text_column = {self.name!r}: {where} holds {found} where there should be texts; "
            f"name a column of texts, or leave such rows out"
        )


def _is_utf8(column: Any) -> bool:
    import pyarrow

    try:
        column.validate(full=True)
    except pyarrow.ArrowInvalid:
        return False
    return True
