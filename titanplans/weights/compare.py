"""How the tensors of a folder, a file or a state dict differ from a model's, in words; and tied ones from each other."""

from collections.abc import Mapping, Sequence

import torch

from titanplans.errors import ModelError
from titanplans.split.objects import broadcast_object, rank
from titanplans.text import counted, some
from titanplans.weights.lazy import LazyTensor

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


def once(
    tensors: Mapping[str, LazyTensor], tied: Mapping[str, str]
) -> tuple[dict[str, LazyTensor], dict[str, LazyTensor]]:
    """Return `tensors` with tied ones once, under the name that they are tied to; and the other copies, by their names."""
    kept, copies = dict(tensors), {}
    for name, source in tied.items():
        if name in kept:
            copy = kept.pop(name)
            if kept.setdefault(source, copy) is not copy:
                copies[name] = copy
    return kept, copies


def check_copies(
    copies: Mapping[str, LazyTensor], kept: Mapping[str, LazyTensor], tied: Mapping[str, str], where: object
) -> None:
    """Refuse, on every rank, copies of a tied tensor that differ, both as `once` returned them. Collective if there are any.

    Raises:
        ModelError: `where` has them.
    """
    for name, copy in copies.items():
        one, two = copy.read(), kept[tied[name]].read()  # on every rank: reading may be collective
        if broadcast_object(rank() == 0 and not torch.equal(one.to(two.dtype), two)):
            raise ModelError(
                f"{where} has {name} and {tied[name]} with other values, and the model's config ties the two: "
                "tie_word_embeddings = false in it keeps both"
            )
