"""Sections of rows, from the units that use each row."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titanplans.derive.sections import Section, find_sections, local_rows


def users(sections, units):
    """Return which units use each row of the sections."""
    everyone = frozenset(range(units))
    rows = []
    for section in sections:
        if section.slices == 1:
            rows += [everyone] * section.rows
            continue
        for index in range(section.slices):
            per_slice = units // section.slices
            owners = frozenset(range(index * per_slice, (index + 1) * per_slice))
            rows += [owners] * (section.rows // section.slices)
    return rows


@st.composite
def layouts(draw):
    units = draw(st.sampled_from([2, 4, 8, 16]))
    slices = [count for count in (1, 2, 4, 8, 16) if units % count == 0]
    sections: list[Section] = []
    for _ in range(draw(st.integers(1, 4))):
        count = draw(st.sampled_from(slices))
        if count == 1 and sections and sections[-1].slices == 1:
            continue  # two of them in a row are one
        sections.append(Section(count * draw(st.integers(1, 3)), count))
    return sections, units


@given(layouts())
def test_sections_are_found_from_the_units_that_use_their_rows(layout):
    sections, units = layout
    assert find_sections(users(sections, units), units) == sections


@given(layouts(), st.sampled_from([2, 4]))
def test_the_rows_of_a_rank_are_those_that_its_units_use(layout, ranks):
    sections, units = layout
    if units % ranks:
        return
    expected = users(sections, units)
    per_rank = units // ranks
    for rank in range(ranks):
        own = set(range(rank * per_rank, (rank + 1) * per_rank))
        rows = [row for row, owners in enumerate(expected) if owners & own]
        assert local_rows(sections, rank, ranks) == rows


@pytest.mark.parametrize(
    "rows",
    [
        [{0}, {1}, {0}, {1, 0}],  # the last row belongs to no slice
        [{1}, {0}],  # not in order
        [{0}, {0}, {1}],  # slices of different sizes
        [{0, 2}, {1, 3}, {0, 2}, {1, 3}],  # units of a slice do not follow each other
    ],
)
def test_other_orders_have_no_sections(rows):
    units = 1 + max(unit for row in rows for unit in row)
    assert find_sections([frozenset(row) for row in rows], units) is None


def test_a_row_that_no_unit_uses_belongs_to_the_slice_before_it():
    rows = [frozenset({0}), frozenset(), frozenset({1}), frozenset({1})]
    assert find_sections(rows, 2) == [Section(4, 2)]
