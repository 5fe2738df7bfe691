"""The role of each parameter for an optimizer: whether it decays, whether it is a matrix, and its packed sections.

It is read off the model as it was built, before anything wraps, splits or shards it: a parameter that becomes a DTensor,
or leaves the meta device, is a new one, and what a model has marked on the old one is gone.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

from torch import nn

from titanplans.errors import PlanError
from titanplans.plan.custom import PlanSource, resolve_plan
from titanplans.plan.degrees import Degrees
from titanplans.plan.options import TPOptions
from titanplans.plan.plan import Plan
from titanplans.plan.registry import model_type_of, registered_plans
from titanplans.split.decoder import find_decoder, join
from titanplans.styles.base import direct_parameters, native_styles
from titanplans.text import class_name
from titanplans.torch_private.modules import CHECKPOINTED
from titanplans.user_code import as_user_error

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_WRAPPED = re.compile(rf"(^|\.){CHECKPOINTED}(?=\.|$)")


class Sections(NamedTuple):
    """Matrices that one parameter holds side by side: queries, keys and values, or gate and up."""

    dim: int
    sizes: tuple[int, ...]


class Role(NamedTuple):
    """What a parameter is to an optimizer."""

    decays: bool = True
    """Whether weight decay is for it: not for vectors, biases, norms, and what the model marks `_no_weight_decay`."""
    hidden: bool = False
    """Whether it is a matrix of a hidden layer, or a stack of them: what Muon is for."""
    fault: str | None = None
    """Why Muon can't take it: its kind."""
    sections: Sections | None = None


class Roles(dict[str, Role]):
    """The role of each parameter, by the name that it has in state dicts."""

    whole: str | None = None
    """Why it is not known which parameters have sections; None: it is."""

    def of(self, name: str, parameter: nn.Parameter, module: nn.Module) -> Role:
        """Return the role of `parameter`; one that has been added since is judged by itself."""
        return self[name] if name in self else _role(name, parameter, module)


def find_roles(model: nn.Module, plan: PlanSource = None, styles: Plan | None = None) -> Roles:
    """Return the roles of the parameters of `model`, which nothing has wrapped or split yet.

    Args:
        model: on any device, meta included.
        plan: the user's own plan, which knows the sections of packed weights; None for the registered one.
        styles: that plan as it was resolved against `model`, where that has been done already.
    """
    ends = {id(parameter) for module in _ends(model) for parameter in module.parameters()}
    roles = Roles()
    try:
        sections = _sections(model, _styles(model, plan) if styles is None else styles)
    except PlanError as error:
        sections, roles.whole = {}, str(error)
    for name, parameter, module in named(model):
        role = _role(name, parameter, module)
        if id(parameter) in ends:
            role = role._replace(hidden=False)
        roles[name] = role._replace(sections=sections.get(name) if role.fault is None else None)
    return roles


def named(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, nn.Module]]:
    """Yield each parameter once, with the name that it has in state dicts and the module that holds it."""
    seen = set()
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                yield join(_WRAPPED.sub("", path).lstrip("."), name), parameter, module


def _role(name: str, parameter: nn.Parameter, module: nn.Module) -> Role:
    own, kind = name.rpartition(".")[2], class_name(module)
    # Mixing weights such as RWKV's are vectors of the shape [1, 1, width].
    dims = parameter.ndim if own.endswith("weight") else sum(size > 1 for size in parameter.shape)
    norm, convolution = "Norm" in kind, isinstance(module, _CONVOLUTIONS)
    marked = getattr(parameter, "_no_weight_decay", False)
    experts = parameter.ndim == 3 and "Experts" in kind
    what = (
        "a convolution's" if convolution
        else None if parameter.ndim == 2 or experts
        else f"of {parameter.ndim} dimension{'s' * (parameter.ndim != 1)} in a {kind}"
    )  # fmt: skip
    bias = "bias" in own
    matrix = not bias and (experts or (parameter.ndim == 2 and own.endswith("weight") and not norm))
    return Role(
        decays=not (dims < 2 or bias or norm or marked),
        hidden=matrix and what is None and not marked and not isinstance(module, nn.Embedding),
        fault=what,
    )


def _ends(model: nn.Module) -> Iterator[nn.Module]:
    """Yield embedding and head."""
    decoder = find_decoder(model, required=False)
    for name in (decoder.embedding, decoder.head):
        if name is not None:
            yield model.get_submodule(name)
    for getter in ("get_input_embeddings", "get_output_embeddings"):
        found = getattr(model, getter, lambda: None)()
        if found is not None:
            yield found


def _styles(model: nn.Module, plan: PlanSource) -> Plan:
    if plan is None and model_type_of(model) not in registered_plans():
        return {}
    source = resolve_plan(plan, model, TPOptions(Degrees(tp=1)))
    with as_user_error(f"plan {type(source).__name__}"):
        return source.full_plan(model)


def _sections(model: nn.Module, styles: Plan) -> dict[str, Sections]:
    found = {}
    modules = dict(model.named_modules())
    for key, style in native_styles(styles).items():
        if style.sections:
            sizes = tuple(section if isinstance(section, int) else section.size for section in style.sections)
            names = [join(key, name) for name in direct_parameters(modules[key])] if key in modules else [key]
            found |= {name: Sections(style.dim, sizes) for name in names}  # type: ignore[attr-defined]
    return found
