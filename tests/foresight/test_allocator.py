"""The caching allocator's rules, each in a sequence of allocations whose outcome follows from torch's source."""

import random

import pytest

from titanplans.foresight.allocator import MIB, Event, replay

BOTH = pytest.mark.parametrize("expandable", [False, True])


def events(*changes):
    """Return the events of changes such as 5 (allocate 5 MiB) and -1 (free the allocation with the index 0)."""
    sizes = []
    result = []
    for change in changes:
        size, stream = change if isinstance(change, tuple) else (change, 0)
        if size > 0:
            result.append(Event(int(size * MIB), len(sizes), stream))
            sizes.append(int(size * MIB))
        else:
            result.append(Event(-sizes[-size - 1], -size - 1, 0))
    return result


def live(sequence):
    """Return the peak of the bytes that are allocated at the same time, not rounded."""
    total = peak = 0
    for event in sequence:
        total += event.size
        peak = max(peak, total)
    return peak


@pytest.mark.parametrize(
    ("size", "standard", "expandable"),
    [
        (0.5, 2, 2),  # small: a segment of 2 MiB
        (1, 2, 2),
        (2, 20, 20),  # large, below 10 MiB: a segment of 20 MiB
        (10, 10, 20),  # a segment of its own, in steps of 2 MiB; expandable ones grow by 20 MiB
        (21, 22, 40),
    ],
)
def test_the_size_of_a_segment(size, standard, expandable):
    assert replay(events(size)).reserved == standard * MIB
    assert replay(events(size), expandable=True).reserved == expandable * MIB


def test_the_rest_of_a_segment_is_used():
    assert replay(events(6, 6, 6)).reserved == 20 * MIB
    assert replay(events(6, 6, 6, 6)).reserved == 40 * MIB


def test_the_smallest_block_that_fits_is_taken():
    # The free blocks have 12 and 30 MiB. The third allocation takes the first of them, so that the fourth fits the other.
    assert replay(events(12, 30, -1, -2, 11, 29)).reserved == 42 * MIB


def test_neighbours_that_are_free_are_merged():
    assert replay(events(9, 9, -1, -2, 18)).reserved == 20 * MIB


def test_a_block_spans_segments_only_if_they_are_expandable():
    changes = events(30, 30, -1, -2, 60)
    assert replay(changes).reserved == 120 * MIB
    assert replay(changes, expandable=True).reserved == 60 * MIB


@BOTH
def test_each_stream_has_its_own_blocks(expandable):
    assert replay(events((20, 0), -1, (20, 1)), expandable=expandable).reserved == 40 * MIB
    assert replay(events((20, 1), -1, (20, 1)), expandable=expandable).reserved == 20 * MIB


def test_unused_segments_are_returned_when_the_device_is_full():
    changes = events(30, -1, 40)
    assert replay(changes).reserved == 70 * MIB
    full = replay(changes, capacity=50 * MIB)
    assert (full.reserved, full.retries, full.is_out_of_memory) == (40 * MIB, 1, False)
    assert replay(changes, capacity=39 * MIB).is_out_of_memory


@BOTH
@pytest.mark.parametrize("seed", range(5))
def test_any_sequence(expandable, seed):
    """Blocks have at least their sizes, in whole segments, and without frees nothing but the ends of segments is lost."""
    generator, sizes = random.Random(seed), []
    changes = []
    for _ in range(400):
        alive = [index for index, size in enumerate(sizes) if size]
        if alive and generator.random() < 0.45:
            index = generator.choice(alive)
            sizes[index] = 0
            changes.append(-index - 1)
        else:
            sizes.append(generator.choice([0.0001, 0.3, 1.5, 7, 33, 200]))
            changes.append((sizes[-1], generator.randrange(3)))
    sequence = events(*changes)
    outcome = replay(sequence, expandable=expandable)
    assert live(sequence) <= outcome.allocated <= outcome.reserved
    assert outcome.reserved % (2 * MIB) == 0
    only_allocations = [event for event in sequence if event.size > 0]
    lost = replay(only_allocations, expandable=expandable).reserved - sum(
        event.size for event in only_allocations
    )
    assert lost < 25 * MIB * len(only_allocations)
