"""`TPPlan`: the class of plans, with the defaults that most architectures share.

A plan maps module names to styles. Its methods plan the modules outside of blocks (`model_plan`), a block (`layer_plan`),
its token mixer (`attn_plan`) and its MLP (`mlp_plan`). A subclass overrides only what differs. `checks` checks the result.
"""

import copy
from collections.abc import Mapping
from typing import NoReturn

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from titanplans.errors import PlanError
from titanplans.plan.options import TPOptions
from titanplans.plan.plan_styles import Plan, PlanStyles
from titanplans.plan.registry import mixer_plan_of, plan_for_mixer
from titanplans.split.decoder import expand_keys, find_block, find_decoder, join
from titanplans.split.local_code import (
    Functions,
    count_once,
    full_width_norm,
    heads_of_result,
    sum_over_ranks,
    without_kernel,
)
from titanplans.styles.kv_colwise import KVColwise

QUERIES_PER_GROUP = ("num_kv_groups", "num_key_value_groups")
"""Attributes in which flash-linear-attention and transformers store the number of query heads per key/value head."""

_RENAMED = {
    "whole": "unsplit",
    "shared": "shared_heads",
    "divided": "divide_by_degree",
    "summed": "sum_over_ranks",
    "over_all_ranks": "full_width_norm",
}
"""Maps former names of methods to current ones."""


class TPPlan(PlanStyles):
    """The model-parallel plan of an architecture. Subclass it, and register the subclass.

    Each `*_plan` method gets the module that it plans, and returns `{name relative to that module: style}`; "" is the
    module itself.
    """

    head_names: tuple[str, ...] = ("num_heads", "num_attention_heads")
    """Attributes in which a mixer or its config may count the query heads, or other units that the mixer is split by."""
    shared_head_names: tuple[str, ...] = ("num_kv_heads", "num_key_value_heads")
    """Attributes that may count the mixer's key/value heads, which ranks may share if there are fewer heads than ranks."""

    mlp_in: tuple[str, ...] = ("gate_proj", "up_proj")
    """The projections of an MLP from the hidden size to its width."""
    mlp_out: str = "down_proj"
    """The projection of an MLP back to the hidden size."""

    degree: int
    """Number of ranks that heads or widths are split over, for `local_attributes` and similar methods: tp x cp in a mixer,
    else tp. The styles of a plan do not depend on `degree`. `options.degrees` has all degrees."""

    origin: str = ""
    """Where the plan is from, for logs and reports: "registered LlamaPlan (plans/hf/llama.py)"; "": it is not resolved."""

    def __init__(self, options: TPOptions):
        self.options, self.degree = options, options.degrees.tp

    def __getattr__(self, name: str) -> NoReturn:
        if name in _RENAMED:
            raise PlanError(
                f"{type(self).__name__} uses self.{name}, which is now called self.{_RENAMED[name]}"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)

    def counting_for(self, degree: int) -> "TPPlan":
        """Return a copy of this plan for `degree` ranks: its methods return one rank's counts of heads and widths."""
        twin = copy.copy(self)
        twin.degree = degree
        return twin

    # Methods that plan parts of a model.

    def model_plan(self, model: nn.Module) -> Plan:
        """Plan the modules outside of blocks: embedding, final norm, head."""
        decoder = find_decoder(model)
        plan: Plan = {}
        if decoder.embedding is not None:
            plan[decoder.embedding] = self.vocab_embedding()
        if decoder.norm is not None:
            plan[decoder.norm] = self.replicated_on_stream()
        if decoder.head is not None:
            plan[decoder.head] = self.vocab_head()
        return plan

    def layer_plan(self, layer: nn.Module) -> Plan:
        """Plan a block: its norms, its mixers with `attn_plan` and its MLPs with `mlp_plan`.

        If a mixer's class belongs to another registered plan, that plan's `attn_plan` is called.
        """
        block = find_block(layer)
        plan: Plan = {name: self.replicated_on_stream() for name in block.norms}
        for name in block.mixers:
            mixer = layer.get_submodule(name)
            plan |= prefixed(name, self.plan_of(mixer).attn_plan(mixer))
        for name in block.mlps:
            plan |= prefixed(name, self.mlp_plan(layer.get_submodule(name)))
        return plan

    def attn_plan(self, attn: nn.Module) -> Plan:
        """Plan a token mixer."""
        raise NotImplementedError(
            f"{type(self).__name__} has no attn_plan, which has to say how {type(attn).__name__} is split"
        )

    def mlp_plan(self, mlp: nn.Module) -> Plan:
        """Plan an MLP, gated or not, by the names in `mlp_in` and `mlp_out`."""
        split = {name: self.colwise() for name in self.mlp_in}
        return {**self.mlp_input(), **split, self.mlp_out: self.rowwise()}

    def heads(self, attn: nn.Module) -> dict[str, int]:
        """Return the head counts of a mixer by name: of query heads and, if it has them, of key/value heads.

        They are attributes of the module or of its config, named in `head_names` and `shared_head_names`. The degree
        has to divide each, except key/value heads that ranks share.
        """
        return _first_count(attn, self.head_names) | _first_count(attn, self.shared_head_names)

    def kv_heads(self, attn: nn.Module) -> int | None:
        """Return the number of key/value heads of a mixer; None: as many as query heads."""
        return next(
            (count for name, count in self.heads(attn).items() if name in self.shared_head_names), None
        )

    def local_attributes(self, attn: nn.Module) -> dict[str, int]:
        """Return `{dotted name: value}` for attributes of a mixer that have to count this rank's heads or widths.

        Leave out attributes that the mixer's code derives from the shapes of its tensors, and the attributes that
        `queries_per_group` returns: these are set anyway.
        """
        return {}

    def queries_per_group(self, attn: nn.Module) -> dict[str, int]:
        """Return `{attribute: this rank's query heads per key/value head}` if ranks share key/value heads; else {}."""
        kv = self.kv_heads(attn)
        queries = [count for name, count in self.heads(attn).items() if name not in self.shared_head_names]
        if kv is None or self.degree <= kv or not queries:
            return {}
        return {name: queries[0] // self.degree for name in QUERIES_PER_GROUP if hasattr(attn, name)}

    def divide_by_degree(self, attn: nn.Module, *names: str) -> dict[str, int]:
        """Return attributes of a mixer that count heads or widths, by dotted name, divided by the degree.

        Raises:
            PlanError: the mixer has no such attribute, or the degree does not divide it.
        """
        values = {}
        for name in names:
            value = attn
            for attribute in name.split("."):
                value = getattr(value, attribute, None)  # type: ignore[assignment]
            if value is None:
                counts = [attribute for attribute, x in vars(attn).items() if type(x) is int]
                raise PlanError(
                    f"{type(attn).__name__} has no {name}, which {type(self).__name__} divides by the degree; it has "
                    f"{', '.join(counts) or 'no attributes that count'}"
                )
            if not isinstance(value, int) or value % self.degree:
                raise PlanError(
                    f"{type(attn).__name__}.{name} = {value!r} is not a multiple of "
                    f"{self.options.name_degree(self.degree)}, by which {type(self).__name__} divides it"
                )
            values[name] = value // self.degree
        return values

    def heads_per_rank(self, heads: int) -> int:
        """Return the number of heads per rank; 1 if ranks share heads, because there are fewer of them."""
        return max(1, heads // self.degree)

    def local_functions(self, attn: nn.Module) -> Functions:
        """Return a maker of a local function for each function of a mixer's code that has to be replaced, by its name.

        Replace functions that depend on a head's index among all heads, such as a decay. A maker gets the function and the
        `HeadRanks`, and returns the local function to call instead. There are three ready makers: `self.full_width_norm`
        for a norm over the full width that is fused with the next product, `self.sum_over_ranks` for a product whose
        result is partial, and `self.without_kernel` for a fused kernel in which ranks can't sum.
        """
        return {}

    def mlp_attributes(self, mlp: nn.Module) -> dict[str, int]:
        """Return `{dotted name: value}` for attributes of an MLP that have to count this rank's width."""
        return {}

    def model_attributes(self, model: nn.Module) -> dict[str, int]:
        """Return `{dotted name: value}` for attributes outside of mixers and MLPs that have to count this rank's heads."""
        return {}

    def model_functions(self, model: nn.Module) -> Functions:
        """Return makers of local functions like `local_functions`, for functions that the model's own code calls.

        A dotted name is the name of a module outside of the mixers, followed by the name of a function that its code
        calls. There are two ready makers: `self.count_once` for an additional loss of replicated tensors, such as a
        router's load-balancing loss, and `self.heads_of_result(heads)` for biases by head, such as ALiBi's.
        """
        return {}

    count_once = staticmethod(count_once)
    full_width_norm = staticmethod(full_width_norm)
    heads_of_result = staticmethod(heads_of_result)
    sum_over_ranks = staticmethod(sum_over_ranks)
    without_kernel = staticmethod(without_kernel)

    def kv_colwise(self, attn: nn.Module) -> ParallelStyle:
        """Shard a projection to the keys or values of `attn` by heads; ranks share heads if there are fewer than ranks.

        Return `colwise()` if `attn` has no count of key/value heads.
        """
        kv = self.kv_heads(attn)
        return self.colwise() if kv is None else KVColwise(heads=kv)

    # Combining the plans of parts.

    def plan_of(self, mixer: nn.Module) -> "TPPlan":
        """Return the plan that splits `mixer`: this plan, unless the mixer's class belongs to another.

        A plan that is not registered for a mixer class, but has an `attn_plan`, splits all mixers of its model.
        """
        owner, own_mixer_plan = plan_for_mixer(mixer), mixer_plan_of(type(self))
        splits_all_mixers = own_mixer_plan is None and type(self).attn_plan is not TPPlan.attn_plan
        if owner is None or owner is own_mixer_plan or splits_all_mixers:
            return self
        return owner(self.options)

    def full_plan(self, model: nn.Module) -> Plan:
        """Return the styles of the model by full name; a key with `*` is replaced by the names that it matches."""
        plan = prefixed("", self.model_plan(model))
        for block in find_decoder(model).blocks:
            for key, style in prefixed(block.name, self.layer_plan(block.module)).items():
                if key in plan:
                    raise PlanError(f"plan key '{key}' is in model_plan and in layer_plan: keep one")
                plan[key] = style
        return {name: plan[key] for name, key in expand_keys(plan, model).items()}


def _first_count(attn: nn.Module, names: tuple[str, ...]) -> dict[str, int]:
    for holder in (attn, getattr(attn, "config", None)):
        for name in names:
            if isinstance(count := getattr(holder, name, None), int):
                return {name: count}
    return {}


def prefixed(name: str, plan: Mapping[str, ParallelStyle]) -> Plan:
    """Put `name`, the module that the keys of `plan` are relative to, in front of each key.

    Raises:
        PlanError: `plan` is not a mapping.
    """
    if not isinstance(plan, Mapping):
        raise PlanError(
            f"the plan of {name} is {plan!r}, not a dict of names and styles: return one from its method"
        )
    return {join(name, key): style for key, style in plan.items()}
