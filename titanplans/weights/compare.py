"""Describe how the tensors of a file differ from a model's, and unify and compare copies of tied tensors."""

from collections.abc import Mapping, Sequence

import torch

from titanplans.errors import ModelError
from titanplans.split.objects import broadcast_object, rank
from titanplans.text import counted, some
from titanplans.weights.lazy import LazyTensor

Shapes = Mapping[str, Sequence[int]]
"""The shape of each tensor, by name."""


def differences(file_shapes: Shapes, model_shapes: Shapes) -> str:
    """Describe how the names and shapes of a file's tensors differ from a model's; return "" if they don't."""
    changed = [
        name
        for name in model_shapes
        if name in file_shapes and tuple(file_shapes[name]) != tuple(model_shapes[name])
    ]
    return describe_kinds(
        {
            "missing": [name for name in model_shapes if name not in file_shapes],
            "unexpected": [name for name in file_shapes if name not in model_shapes],
            "of another shape": [
                f"{name} {tuple(file_shapes[name])}, expected {tuple(model_shapes[name])}" for name in changed
            ],
        }
    )


def describe_kinds(names_by_kind: Mapping[str, Sequence[str]]) -> str:
    """Describe the number and the first names of the tensors of each kind: "2 tensors missing (a, b)"; "" if none."""
    return "; ".join(
        f"{counted(len(names), 'tensor')} {kind} ({some(names)})"
        for kind, names in names_by_kind.items()
        if names
    )


def unify_tied(
    tensors: Mapping[str, LazyTensor], tied: Mapping[str, str]
) -> tuple[dict[str, LazyTensor], dict[str, LazyTensor]]:
    """Keep only one tensor of each group of tied tensors.

    Args:
        tensors: the tensors by parameter name.
        tied: maps the name of a tied parameter to the name that it is tied to.

    Returns:
        A pair. First, the tensors by name; a tied tensor is only under the name that it is tied to. Second, the copies
            of tied tensors that were left out, by their own names.
    """
    unified, copies = dict(tensors), {}
    for name, source in tied.items():
        if name in unified:
            copy = unified.pop(name)
            if unified.setdefault(source, copy) is not copy:
                copies[name] = copy
    return unified, copies


def check_tied_copies(
    copies: Mapping[str, LazyTensor],
    unified: Mapping[str, LazyTensor],
    tied: Mapping[str, str],
    where: object,
) -> None:
    """Raise an error on every rank if copies of a tied tensor differ. Collective if there are copies.

    Args:
        copies, unified: the results of `unify_tied`.
        tied: see `unify_tied`.
        where: the folder or model, for the message.

    Raises:
        ModelError: names two copies that differ.
    """
    for name, copy in copies.items():
        # Every rank reads the tensors, since reading may be collective. Only rank 0 compares them, since other ranks may
        # get no values.
        value, source_value = copy.read(), unified[tied[name]].read()
        if broadcast_object(rank() == 0 and not torch.equal(value.to(source_value.dtype), source_value)):
            raise ModelError(
                f"{where} has {name} and {tied[name]} with different values, but the model's config ties the two: "
                "set tie_word_embeddings = false in the config to keep both"
            )
