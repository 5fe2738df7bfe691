"""How the tensors of a folder, a file or a state dict differ from a model's, in words."""

from collections.abc import Mapping, Sequence

from titanplans.text import counted, some

Shapes = Mapping[str, Sequence[int]]
"""By the name of a tensor."""


def differences(theirs: Shapes, ours: Shapes) -> str:
    """Return how the names and shapes of a file's tensors, `theirs`, differ from a model's; "" where they do not."""
    both = [name for name in ours if name in theirs and tuple(theirs[name]) != tuple(ours[name])]
    return in_words(
        {
            "of the model not in it": [name for name in ours if name not in theirs],
            "of it not in the model": [name for name in theirs if name not in ours],
            "of another shape": [
                f"{name} {tuple(theirs[name])}, expected {tuple(ours[name])}" for name in both
            ],
        }
    )


def in_words(kinds: Mapping[str, Sequence[str]]) -> str:
    """Return how many tensors there are of each kind, and the names of the first; "" where there are none."""
    found = {what: names for what, names in kinds.items() if names}
    return "; ".join(
        f"{counted(len(names), 'tensor')} {what} ({some(names)})" for what, names in found.items()
    )
