"""`resolve_plan`: return a user's plan, given in any form in which a job can name it.

[model]
plan = "gla"                          a registered name
plan = "my_package.plans:MyPlan"      a TPPlan class, or a dict, in a Python module
[model.plan]                          patterns of module names, each with the name of a style
"model.embeddings" = "vocab_embedding"
"model.layers.*.attn" = "attn_input"
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from titanplans.config.families import unknown_plan
from titanplans.errors import PlanError
from titanplans.plan.options import TPOptions
from titanplans.plan.plan import Plan, TPPlan
from titanplans.plan.registry import faulty_plans, plan_for_model, registered_plans
from titanplans.split.converted import recipe_of
from titanplans.split.decoder import expand_keys, find_decoder
from titanplans.user_code import as_user_error, load_attribute

PlanSource = str | type[TPPlan] | Mapping[str, str | ParallelStyle] | None

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
    """A plan given as a dict: `*` stands for one component of a module name, and each pattern has to match a name."""

    def __init__(self, options: TPOptions, patterns: Mapping[str, str | ParallelStyle]):
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
        return plan

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


def resolve_plan(source: PlanSource, model: nn.Module, options: TPOptions) -> TPPlan:
    """Return the plan that `source` names for `model`; None: the registered one.

    The float8 recipe of `model` is added to `options`.

    Raises:
        PlanError: nothing is registered under that name, the module or its attribute does not exist, or it is neither a
            TPPlan class nor a dict.
    """
    options = replace(options, float8=recipe_of(model))
    if source is None:
        return plan_for_model(model)(options)
    if isinstance(source, str):
        source = _load(source)
    if isinstance(source, Mapping):
        return DictPlan(options, source)
    if isinstance(source, type) and issubclass(source, TPPlan):
        with as_user_error(f"{source.__name__} can't be created with its options"):
            return source(options)
    raise PlanError(f"plan = {source!r}: neither a TPPlan class nor a dict of module names and styles")


def _load(name: str) -> type[TPPlan] | Mapping[str, str | ParallelStyle]:
    if ":" in name:
        return load_attribute(name, f"plan = '{name}'", fits=_is_plan)
    registered = registered_plans()
    if name not in registered:
        raise unknown_plan(name, registered, faulty_plans())
    return registered[name]


def _is_plan(value: object) -> bool:
    return isinstance(value, Mapping) or (
        isinstance(value, type) and issubclass(value, TPPlan) and value is not TPPlan
    )
