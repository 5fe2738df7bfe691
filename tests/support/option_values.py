"""Hypothesis strategies for the values of an option, by the option's type."""

from types import UnionType
from typing import Annotated, Literal, Union, get_args, get_origin

from hypothesis import strategies as st

from titanplans.config.options import options_of
from titanplans.config.values import is_options, without_none_type


def values_of(hint, leaves, constrained=lambda hint, values: values):
    """Return a strategy for values of type `hint`.

    Args:
        hint: the type of an option.
        leaves: a strategy for each plain type.
        constrained: changes the strategy for an Annotated type.
    """
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return st.sampled_from(arguments)
    if is_options(hint):
        fields = {field.name: without_none_type(field.hint) for field in options_of(hint)}
        of = {name: values_of(each, leaves, constrained) for name, each in fields.items()}
        return st.fixed_dictionaries({}, optional=of)
    nested = [each for each in arguments if each in leaves or get_args(each) or is_options(each)]
    inside = [values_of(each, leaves, constrained) for each in nested]
    if origin is Annotated:
        return constrained(hint, inside[0])
    if origin in (Union, UnionType):
        return st.one_of(inside)
    if origin is tuple:
        return st.lists(inside[0], max_size=3).map(tuple)
    return leaves[hint] if origin is None else st.dictionaries(*inside, max_size=3)
