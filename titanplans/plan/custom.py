"""Find the plan of a model: `find_plan` returns the user's plan, the registered one, or a kept one (`plan.kept`).

`resolve_plan` also gives the plan its options. A job's [model] section names a plan in one of these ways:

[model]
plan = "gla"                          a registered name
plan = "my_package.plans:MyPlan"      a TPPlan class, a dict, or a function that returns a dict, in a Python module
plan = "my_package.plans.my_plan"     the same, as NeMo Automodel writes it
derive = true                         if no plan is registered: the plan that `titanplans derive` has proved and kept
[model.plan]                          patterns of module names, each with the name of a style
"model.embeddings" = "vocab_embedding"
"model.layers.*.attn" = "attn_input"
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import FunctionType

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from titanplans.config.families import names_code, unknown_plan
from titanplans.errors import PlanError
from titanplans.plan.kept import kept_plan, not_kept
from titanplans.plan.options import TPOptions
from titanplans.plan.plan import Plan, TPPlan
from titanplans.plan.registry import faulty_plans, file_of, model_type_of, plan_for_model, registered_plans
from titanplans.plan.torch_styles import complete, has_only_torch_styles
from titanplans.split.converted import recipe_of
from titanplans.split.decoder import expand_keys, find_decoder
from titanplans.user_code import as_user_error, load_attribute

Patterns = Mapping[str, str | ParallelStyle]


@dataclass(frozen=True)
class LocatedPlan:
    """A plan without its options, and where it is from."""

    plan: type[TPPlan] | Patterns
    origin: str
    """A phrase for logs and reports: "registered LlamaPlan (plans/hf/llama.py)"."""


PlanSource = str | type[TPPlan] | Patterns | Callable[[], Patterns] | LocatedPlan | None

STYLES: Mapping[str, Callable[[TPPlan, nn.Module | None], ParallelStyle]] = {
    "attn_input": lambda plan, mixer: plan.attn_input()[""],
    "attn_region": lambda plan, mixer: plan.attn_region()[""],
    "attn_input(may_gather=True)": lambda plan, mixer: plan.attn_input(may_gather=True)[""],
    "attn_region(may_gather=True)": lambda plan, mixer: plan.attn_region(may_gather=True)[""],
    "mlp_input": lambda plan, mixer: plan.mlp_input()[""],
    "mlp_region": lambda plan, mixer: plan.mlp_region()[""],
    "colwise": lambda plan, mixer: plan.colwise(),
    "kv_colwise": lambda plan, mixer: plan.colwise() if mixer is None else plan.kv_colwise(mixer),
    "rowwise": lambda plan, mixer: plan.rowwise(),
    "rowwise_partial": lambda plan, mixer: plan.rowwise(reduce_output=False),
    "rowwise_in_region": lambda plan, mixer: plan.rowwise_in_region(),
    "split_norm": lambda plan, mixer: plan.split_norm(),
    "gathered_in_region": lambda plan, mixer: plan.gathered_in_region(),
    "added_to_sum": lambda plan, mixer: plan.added_to_sum(),
    "replicated_in_region": lambda plan, mixer: plan.replicated_in_region(),
    "replicated_on_stream": lambda plan, mixer: plan.replicated_on_stream(),
    "replicated_off_stream": lambda plan, mixer: plan.replicated_off_stream(),
    "end_of_stream": lambda plan, mixer: plan.end_of_stream(),
    "end_of_stream(may_gather=True)": lambda plan, mixer: plan.end_of_stream(may_gather=True),
    "vocab_embedding": lambda plan, mixer: plan.vocab_embedding(),
    "vocab_embedding_begins_stream": lambda plan, mixer: plan.vocab_embedding(begins_stream=True),
    "vocab_embedding(all_tokens=True)": lambda plan, mixer: plan.vocab_embedding(all_tokens=True),
    "vocab_head": lambda plan, mixer: plan.vocab_head(),
}
"""Maps the name of a style in a dict plan to the TPPlan method that makes it, given the mixer that contains the module."""

RENAMED = {
    "replicated": "replicated_in_region",
    "sequence_parallel": "replicated_on_stream",
    "no_parallel": "replicated_off_stream",
    "replicated_before_stream": "replicated_off_stream",
    "attn_input(gathers=True)": "attn_input(may_gather=True)",
    "attn_region(gathers=True)": "attn_region(may_gather=True)",
    "end_of_stream(gathers=True)": "end_of_stream(may_gather=True)",
}
"""Maps former names of styles to current ones."""


class DictPlan(TPPlan):
    """A plan given as a dict: `*` stands for one component of a module name, and each pattern has to match a name.

    If all styles are torch's, modules that no pattern matches are replicated, as in torch's `parallelize_module`.
    """

    def __init__(self, options: TPOptions, patterns: Patterns):
        super().__init__(options)
        self.patterns = patterns

    def full_plan(self, model: nn.Module) -> Plan:
        plan: Plan = {}
        decoder = find_decoder(model, required=False)
        mixers = decoder.mixers
        for name, pattern in expand_keys(self.patterns, model).items():
            around = decoder.mixer_around(name)
            mixer = None if around is None else mixers[around]
            plan[name] = self._style(pattern, self.patterns[pattern], mixer)
        return complete(plan, model, decoder, self) if has_only_torch_styles(plan) else plan

    def _style(self, pattern: str, style: str | ParallelStyle, mixer: nn.Module | None) -> ParallelStyle:
        if isinstance(style, ParallelStyle):
            return style
        if style in RENAMED:
            raise PlanError(f"plan key '{pattern}' = {style!r}: this style is now called '{RENAMED[style]}'")
        if style not in STYLES:
            raise PlanError(
                f"plan key '{pattern}' = {style!r}: no such style; there are {', '.join(sorted(STYLES))}"
            )
        return STYLES[style](self, mixer)


def find_plan(source: PlanSource, model: nn.Module, *, derive: bool = False) -> LocatedPlan:
    """Return the plan for the unsplit `model`: the user's, else the registered one, else a kept one if that is allowed.

    Args:
        source: the user's plan; None: there is none.
        model: the unsplit model, on any device, before it is converted to float8.
        derive: allow a plan that `titanplans derive --keep` has proved for a model of this structure. Nothing is derived
            here.

    Raises:
        PlanError: there is no plan in any of the three sources; the module or attribute that `source` names does not
            exist, or is neither a TPPlan class nor a dict; the file of a kept plan was changed.
    """
    if isinstance(source, LocatedPlan):
        return source
    if source is not None:
        return _users_plan(source)
    model_type = model_type_of(model)
    if derive and model_type not in registered_plans():
        kept = kept_plan(model)
        if kept is None:
            raise not_kept(model)
        return LocatedPlan(kept.plan, kept.origin)
    return _registered(plan_for_model(model))


def resolve_plan(source: PlanSource, model: nn.Module, options: TPOptions, *, derive: bool = False) -> TPPlan:
    """Return the plan that `find_plan` finds, created with `options` and the float8 recipe of `model`.

    Raises:
        PlanError: as `find_plan`.
    """
    options = replace(options, float8=recipe_of(model))
    located = find_plan(source, model, derive=derive)
    if isinstance(located.plan, Mapping):
        plan: TPPlan = DictPlan(options, located.plan)
    else:
        with as_user_error(f"{located.plan.__name__} can't be created with its options"):
            plan = located.plan(options)
    plan.origin = located.origin
    return plan


def _users_plan(source: object) -> LocatedPlan:
    if isinstance(source, str):
        if not names_code(source):
            return _registered(_named(source), f", named by plan = '{source}'")
        module, _, attribute = source.partition(":") if ":" in source else source.rpartition(".")
        plan = load_attribute(f"{module}:{attribute}", f"plan = '{source}'", fits=_is_plan)
        origin = f"user's {source}"
    else:
        plan = source
        name = getattr(source, "__qualname__", None)
        origin = f"user's {getattr(source, '__module__', '')}:{name}" if name else "user's dict of styles"
    if isinstance(plan, FunctionType):
        plan = _called(plan)
    if isinstance(plan, Mapping) or (isinstance(plan, type) and issubclass(plan, TPPlan)):
        return LocatedPlan(plan, origin)
    raise PlanError(
        f"plan = {source!r}: neither a TPPlan class, nor a dict of module names and styles, nor a function that returns one"
    )


def _registered(plan: type[TPPlan], note: str = "") -> LocatedPlan:
    return LocatedPlan(plan, f"registered {plan.__name__} ({file_of(plan)}){note}")


def _named(name: str) -> type[TPPlan]:
    registered = registered_plans()
    if name not in registered:
        raise unknown_plan(name, registered, faulty_plans())
    return registered[name]


def _called(function: FunctionType) -> object:
    what = f"plan = {function.__module__}:{function.__qualname__}"
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise PlanError(
            f"{what}: neither a TPPlan class nor a dict, and a function that returns a plan is called without arguments "
            f"({error}); give them defaults"
        ) from error
    with as_user_error(what):
        return function()


def _is_plan(value: object) -> bool:
    return isinstance(value, Mapping | FunctionType) or (
        isinstance(value, type) and issubclass(value, TPPlan) and value is not TPPlan
    )
