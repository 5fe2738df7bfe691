"""Find sections of a parameter's rows, given which units use each row. A unit is, for example, a head."""

from collections.abc import Sequence
from typing import NamedTuple


class Section(NamedTuple):
    """Consecutive rows of a parameter that are split evenly over units.

    Attributes:
        rows: the number of rows.
        slices: number of equal, consecutive slices, each used by the same number of units. 1: all units use all rows.
    """

    rows: int
    slices: int

    def local(self, rank: int, ranks: int) -> range:
        """Return the rows that `rank` of `ranks` uses, counted from the section's first; ranks may share a slice."""
        if self.slices == 1:
            return range(self.rows)
        rows_per_slice = self.rows // self.slices
        count = max(1, self.slices // ranks)
        first = rank * self.slices // ranks
        return range(first * rows_per_slice, (first + count) * rows_per_slice)


def find_sections(users: Sequence[frozenset[int]], units: int) -> list[Section] | None:
    """Return the sections of rows, given the units that use each row; None if rows are not even slices in order of units.

    A row that no unit uses, such as one that a mask removes, belongs to the slice of the row before it.
    """
    everyone = frozenset(range(units))
    filled: list[frozenset[int]] = []
    for row in users:
        filled.append(row or (filled[-1] if filled else next((other for other in users if other), everyone)))
    sections, first = [], 0
    while first < len(filled):
        end = first
        while end < len(filled) and filled[end] == filled[first]:
            end += 1
        if filled[first] == everyone:
            sections.append(Section(end - first, 1))
            first = end
            continue
        rows_per_slice, units_per_slice = end - first, len(filled[first])
        if units % units_per_slice:
            return None
        slices = units // units_per_slice
        end = first + rows_per_slice * slices
        expected = [
            frozenset(range(index * units_per_slice, (index + 1) * units_per_slice))
            for index in range(slices)
            for _ in range(rows_per_slice)
        ]
        if filled[first:end] != expected:
            return None
        sections.append(Section(end - first, slices))
        first = end
    return sections


def local_rows(sections: Sequence[Section], rank: int, ranks: int) -> list[int]:
    """Return the rows of a parameter that `rank` of `ranks` uses."""
    rows, first = [], 0
    for section in sections:
        rows += [first + row for row in section.local(rank, ranks)]
        first += section.rows
    return rows
