"""`TPPlan`: what a model-parallel plan is, and the parts that most architectures share.

A plan maps module names to styles, part by part: the model's ends (`model_plan`), a block
(`layer_plan`), its token mixer (`attn_plan`), its MLP (`mlp_plan`). A subclass overrides only what
differs. Which module may be split how is checked in `checks`, not here.
"""

import copy
from collections.abc import Mapping

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from titanplans.errors import PlanError
from titanplans.plan.options import TPOptions
from titanplans.plan.plan_styles import Plan, PlanStyles
from titanplans.plan.registry import mixer_plan_of, plan_for_mixer
from titanplans.split.decoder import expand_keys, find_block, find_decoder, join
from titanplans.split.local_code import Functions, count_once, over_all_ranks, summed
from titanplans.styles.kv_colwise import KVColwise

_GROUPS = ("num_kv_groups", "num_key_value_groups")
"""Under these names flash-linear-attention and transformers keep queries per key/value head."""


class TPPlan(PlanStyles):
    """The tensor-parallel plan of an architecture. Subclass it, and register the subclass.

    Each `*_plan` method gets the module that it plans and returns `{name relative to it: style}`,
    where "" is the module itself.
    """

    head_names: tuple[str, ...] = ("num_heads", "num_attention_heads")
    """Under these names a mixer or its config counts query heads, or what else its parts are split by."""
    shared_head_names: tuple[str, ...] = ("num_kv_heads", "num_key_value_heads")
    """Under these names it counts key/value heads, which ranks share where there are fewer of them."""

    mlp_in: tuple[str, ...] = ("gate_proj", "up_proj")
    """The projections of an MLP from the hidden size to its width."""
    mlp_out: str = "down_proj"
    """The one back."""

    degree: int
    """How many ranks the heads or the width are split over whose counts a plan is asked for: tp x cp in a mixer, else tp.
    For `local_attributes` and the like. Styles are the same at every degree; `options.degrees` has all degrees."""

    def __init__(self, options: TPOptions):
        self.options, self.degree = options, options.degrees.tp

    def counting_for(self, degree: int) -> "TPPlan":
        """Return this plan to ask for what each of `degree` ranks counts."""
        twin = copy.copy(self)
        twin.degree = degree
        return twin

    # The parts of a model.

    def model_plan(self, model: nn.Module) -> Plan:
        """Plan what stands outside the blocks: embedding, final norm, head."""
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
        """Plan a block: its norms, and by `attn_plan` and `mlp_plan` its mixer and its MLP.

        A mixer whose class belongs to another registered plan is planned by that one.
        """
        block = find_block(layer)
        plan: Plan = {name: self.replicated_on_stream() for name in block.norms}
        if block.mixer is not None:
            mixer = layer.get_submodule(block.mixer)
            plan |= prefixed(block.mixer, self.plan_of(mixer).attn_plan(mixer))
        if block.mlp is not None:
            plan |= prefixed(block.mlp, self.mlp_plan(layer.get_submodule(block.mlp)))
        return plan

    def attn_plan(self, attn: nn.Module) -> Plan:
        """Plan a token mixer."""
        raise NotImplementedError(
            f"{type(self).__name__} must say how {type(attn).__name__} is split: attn_plan"
        )

    def mlp_plan(self, mlp: nn.Module) -> Plan:
        """Plan an MLP, gated or not, by the names in `mlp_in` and `mlp_out`."""
        split = {name: self.colwise() for name in self.mlp_in}
        return {**self.mlp_input(), **split, self.mlp_out: self.rowwise()}

    def heads(self, attn: nn.Module) -> dict[str, int]:
        """Return the head counts of a mixer by name: of the query heads and, if it says, of the key/value heads.

        They are attributes of the module, or else of its config, under `head_names` and `shared_head_names`. Each has to be
        a multiple of the degree, but for the latter where ranks share heads.
        """
        return _first_count(attn, self.head_names) | _first_count(attn, self.shared_head_names)

    def kv_heads(self, attn: nn.Module) -> int | None:
        """Return how many key/value heads a mixer has; None if `heads` does not say: then as many as query heads."""
        return next(
            (count for name, count in self.heads(attn).items() if name in self.shared_head_names), None
        )

    def local_attributes(self, attn: nn.Module) -> dict[str, int]:
        """Return the attributes of a mixer that must count this rank's heads or widths, by dotted name, and their values.

        Only what its code does not read off its tensors. What `queries_per_group` returns is set without being named.
        """
        return {}

    def queries_per_group(self, attn: nn.Module) -> dict[str, int]:
        """Return how many query heads of this rank share a key/value head, by attribute, where ranks share those."""
        kv = self.kv_heads(attn)
        queries = [count for name, count in self.heads(attn).items() if name not in self.shared_head_names]
        if kv is None or self.degree <= kv or not queries:
            return {}
        return {name: queries[0] // self.degree for name in _GROUPS if hasattr(attn, name)}

    def divided(self, attn: nn.Module, *names: str) -> dict[str, int]:
        """Return attributes of a mixer that count heads or widths, by dotted name, divided by the degree.

        Raises:
            PlanError: the mixer has no such attribute, or the degree does not divide it.
        """
        values = {}
        for name in names:
            value = attn
            for step in name.split("."):
                value = getattr(value, step, None)  # type: ignore[assignment]
            if value is None:
                counts = [own for own, number in vars(attn).items() if type(number) is int]
                raise PlanError(
                    f"{type(attn).__name__} has no {name}, which {type(self).__name__} divides by the degree; it has "
                    f"{', '.join(counts) or 'no attributes that count'}"
                )
            if not isinstance(value, int) or value % self.degree:
                raise PlanError(
                    f"{type(attn).__name__}.{name} = {value!r} is no multiple of {self.options.name_degree(self.degree)}, "
                    f"by which {type(self).__name__} divides it"
                )
            values[name] = value // self.degree
        return values

    def heads_per_rank(self, heads: int) -> int:
        """Return how many of so many heads a rank has, where ranks share them if there are too few."""
        return max(1, heads // self.degree)

    def local_functions(self, attn: nn.Module) -> Functions:
        """Return makers of this rank's versions of functions that a mixer's code calls, by name.

        For functions with global knowledge, such as a decay that depends on a head's number. Each gets the function and
        the `HeadRanks` of the heads, and returns the function to call instead. `self.over_all_ranks` makes one for a
        norm over the whole width that is fused with the product behind it, `self.summed` for a product that the ranks hold
        as summands.
        """
        return {}

    def mlp_attributes(self, mlp: nn.Module) -> dict[str, int]:
        """Return the attributes of an MLP that must count this rank's width, by dotted name, and their values."""
        return {}

    def model_attributes(self, model: nn.Module) -> dict[str, int]:
        """Return the attributes outside of mixers and MLPs that must count this rank's heads, by dotted name."""
        return {}

    def model_functions(self, model: nn.Module) -> Functions:
        """Return what makes this rank's functions of those that the model's own code calls, as `local_functions` does.

        A dotted name is that of a module in it, outside of the mixers, and of what the module's code calls.
        For a loss that the model adds of what is replicated, such as the balance of a router: `self.count_once`.
        """
        return {}

    count_once = staticmethod(count_once)
    over_all_ranks = staticmethod(over_all_ranks)
    summed = staticmethod(summed)

    def kv_colwise(self, attn: nn.Module) -> ParallelStyle:
        """Shard a projection to the keys or values of `attn` by heads, which ranks share where there are too few.

        `colwise()` if `attn` counts no key/value heads.
        """
        kv = self.kv_heads(attn)
        return self.colwise() if kv is None else KVColwise(heads=kv)

    # Putting the parts together.

    def plan_of(self, mixer: nn.Module) -> "TPPlan":
        """Return the plan that splits `mixer`: this one, unless its class belongs to another.

        A plan that is registered for no mixer, and has an `attn_plan`, speaks for all of its mixers.
        """
        owner, mine = plan_for_mixer(mixer), mixer_plan_of(type(self))
        speaks_for_all = mine is None and type(self).attn_plan is not TPPlan.attn_plan
        if owner is None or owner is mine or speaks_for_all:
            return self
        return owner(self.options)

    def full_plan(self, model: nn.Module) -> Plan:
        """Return the whole plan, by fully qualified name; what a key with `*` matches, one by one."""
        plan = prefixed("", self.model_plan(model))
        for block in find_decoder(model).blocks:
            for key, style in prefixed(block.name, self.layer_plan(block.module)).items():
                if key in plan:
                    raise PlanError(f"plan key '{key}' is given by model_plan and by layer_plan: keep one")
                plan[key] = style
        return {name: plan[key] for name, key in expand_keys(plan, model).items()}


def _first_count(attn: nn.Module, names: tuple[str, ...]) -> dict[str, int]:
    for holder in (attn, getattr(attn, "config", None)):
        for name in names:
            if isinstance(count := getattr(holder, name, None), int):
                return {name: count}
    return {}


def prefixed(name: str, plan: Mapping[str, ParallelStyle]) -> Plan:
    """Return `plan` with its keys relative to the parent of the module `name`.

    Raises:
        PlanError: `plan` is no mapping.
    """
    if not isinstance(plan, Mapping):
        raise PlanError(
            f"the plan of {name} is {plan!r}, not a dict of names and styles: does its method return one?"
        )
    return {join(name, key): style for key, style in plan.items()}
