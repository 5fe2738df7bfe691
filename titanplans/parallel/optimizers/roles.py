"""`Role` of a parameter for an optimizer: whether it decays, whether Muon can update it, and its packed sections.

Roles are found before the model is wrapped, split or sharded: a parameter that becomes a DTensor or leaves meta is a new
tensor, without the attributes that the model set on the old one (`_no_weight_decay`).
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
    """Matrices packed in one parameter along `dim`: queries, keys and values, or gate and up projections."""

    dim: int
    sizes: tuple[int, ...]


class Role(NamedTuple):
    """The properties of a parameter that an optimizer needs."""

    decays: bool = True
    """Whether the parameter has weight decay. False for vectors, biases, norms and parameters marked
    `_no_weight_decay`."""
    hidden: bool = False
    """Whether the parameter is a matrix of a hidden layer, or a stack of such matrices: Muon updates these by default."""
    fault: str | None = None
    """A description of the parameter if Muon can't update it, such as "of 1 dimension in a Linear". None: Muon can."""
    sections: Sections | None = None
    """None: the parameter is one matrix, or no plan has its sections."""


class Roles(dict[str, Role]):
    """The role of each parameter, by its name in state dicts."""

    sections_unknown: str | None = None
    """Why the sections of packed parameters are not known; None: they are known."""

    def of(self, name: str, parameter: nn.Parameter, module: nn.Module) -> Role:
        """Return the role of `parameter` of `module`, also if it was added after the roles were found."""
        return self[name] if name in self else _role(name, parameter, module)


def find_roles(model: nn.Module, plan: PlanSource = None, styles: Plan | None = None) -> Roles:
    """Return the roles of the parameters of `model`, before it is wrapped or split.

    Args:
        model: on any device, meta included.
        plan: a custom plan, whose styles have the sections of packed weights; None for the registered one.
        styles: the styles of the plan for `model`, if they are resolved already.
    """
    ends = {id(parameter) for module in _ends(model) for parameter in module.parameters()}
    roles = Roles()
    try:
        sections = _sections(model, _styles(model, plan) if styles is None else styles)
    except PlanError as error:
        sections, roles.sections_unknown = {}, str(error)
    for name, parameter, module in named(model):
        role = _role(name, parameter, module)
        if id(parameter) in ends:
            role = role._replace(hidden=False)
        roles[name] = role._replace(sections=sections.get(name) if role.fault is None else None)
    return roles


def named(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, nn.Module]]:
    """Yield each parameter once, as (name in state dicts, parameter, module that holds it)."""
    seen = set()
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                yield join(_WRAPPED.sub("", path).lstrip("."), name), parameter, module


def _role(name: str, parameter: nn.Parameter, module: nn.Module) -> Role:
    last_name, kind = name.rpartition(".")[2], class_name(module)
    # Dimensions of size 1 do not count: mixing weights such as RWKV's are vectors of the shape [1, 1, width].
    dims = parameter.ndim if last_name.endswith("weight") else sum(size > 1 for size in parameter.shape)
    norm, convolution = "Norm" in kind, isinstance(module, _CONVOLUTIONS)
    marked = getattr(parameter, "_no_weight_decay", False)
    experts = parameter.ndim == 3 and "Experts" in kind
    fault = (
        "a convolution's" if convolution
        else None if parameter.ndim == 2 or experts
        else f"of {parameter.ndim} dimension{'s' * (parameter.ndim != 1)} in a {kind}"
    )  # fmt: skip
    bias = "bias" in last_name
    matrix = not bias and (experts or (parameter.ndim == 2 and last_name.endswith("weight") and not norm))
    return Role(
        decays=not (dims < 2 or bias or norm or marked),
        hidden=matrix and fault is None and not marked and not isinstance(module, nn.Embedding),
        fault=fault,
    )


def _ends(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the embedding and the head, by the decoder's structure and by transformers' getters."""
    decoder = find_decoder(model, required=False)
    for name in (decoder.embedding, decoder.head):
        if name is not None:
            yield model.get_submodule(name)
    for getter in ("get_input_embeddings", "get_output_embeddings"):
        module = getattr(model, getter, lambda: None)()
        if module is not None:
            yield module


def _styles(model: nn.Module, plan: PlanSource) -> Plan:
    if plan is None and model_type_of(model) not in registered_plans():
        return {}
    source = resolve_plan(plan, model, TPOptions(Degrees(tp=1)))
    with as_user_error(f"plan {type(source).__name__}"):
        return source.full_plan(model)


def _sections(model: nn.Module, styles: Plan) -> dict[str, Sections]:
    sections = {}
    modules = dict(model.named_modules())
    for key, style in native_styles(styles).items():
        if style.sections:
            sizes = tuple(section if isinstance(section, int) else section.size for section in style.sections)
            names = [join(key, name) for name in direct_parameters(modules[key])] if key in modules else [key]
            sections |= {name: Sections(style.dim, sizes) for name in names}  # type: ignore[attr-defined]
    return sections
