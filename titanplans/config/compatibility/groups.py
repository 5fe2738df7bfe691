"""What contradicts what within one group of options."""

from typing import Any

from titanplans.config.compatibility.words import default, fields, get, needs
from titanplans.config.options import Refusals

_RECOMPUTING = ("full", "selective", "mlp", "keep_mixer")
WITH_ATTENTION = ("full", "selective", "keep_mixer")
RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")


def activation_checkpoint(c: Any) -> Refusals:
    """Yield what [activation_checkpoint] contradicts in itself."""
    shapes = "per_op_sac_force_recompute_mm_shapes_by_fqns"
    per_operator = [name for name in fields(type(c)) if name.startswith("per_op_sac_")]
    yield from needs(c, "mode", (*_RECOMPUTING, "memory_budget"), "scope")
    yield from needs(
        c, "mode", _RECOMPUTING, "preserve_rng_state", "determinism_check", "early_stop", "debug"
    )
    yield from needs(c, "mode", ("memory_budget",), "memory_budget", "visualize_memory_budget_pareto")
    yield from needs(c, "mode", ("selective",), *per_operator)
    yield from needs(c, "selective_ac_option", ("op",), *per_operator)
    if get(c, shapes) and c.per_op_sac_matmuls == "none":
        yield (
            shapes,
            'it makes exceptions from what per_op_sac_matmuls keeps, which is "none": leave one of the two out',
        )
    kept = (c.per_op_sac_keep_attention, c.per_op_sac_keep_collectives, c.per_op_sac_keep_operators)
    if c.per_op_sac_matmuls == "none" and not any(kept):
        yield "per_op_sac_matmuls", "nothing else is kept, either: take mode full, or say what to keep"


def compiled(c: Any) -> Refusals:
    """Yield what [compile] contradicts in itself."""
    if c.enable and not c.components:
        yield "components", 'nothing is compiled so: name "model", "loss" or "optimizer"'
    if len(set(c.components)) < len(c.components):
        yield "components", "one is named twice: once is enough"
    if c.enable and c.fullgraph and "optimizer" in c.components:
        yield (
            "fullgraph",
            'an optimizer\'s step is several graphs: leave fullgraph out, or "optimizer" out of components',
        )
    if c.enable and c.mode is not None and c.options is not None:
        yield "options", "compile.mode and compile.options exclude each other: leave one of the two out"


def loss(c: Any) -> Refusals:
    """Yield what [loss] contradicts in itself."""
    yield from needs(c, "fused", (True, None), "chunk_tokens")


OF_MUON = ("momentum", "nesterov", "ns_steps", "adjust_lr_fn")
OF_ADAM = ("beta1", "beta2", "eps")
"""Keys of [optimizer] and of its groups that one kind of optimizer reads."""


def optimizer_group(g: Any) -> Refusals:
    """Yield what a group of [optimizer] contradicts in itself, or does not do."""
    given = [name for name in fields(type(g)) if name != "pattern" and getattr(g, name) is not None]
    if not given:
        yield (
            "pattern",
            "the group has no other key, so it changes nothing: give it another, such as lr, or leave it out",
        )
    for name in OF_ADAM if g.name == "Muon" else OF_MUON if g.name is not None else ():
        if name in given:
            yield name, f'name = "{g.name}" does not read it: leave one of the two out'


def optimizer(o: Any) -> Refusals:
    """Yield what [optimizer] contradicts in itself."""
    muon = o.name == "Muon" or any(group.name == "Muon" for group in o.groups)
    if not muon:
        yield from needs(o, "name", ("Muon",), *OF_MUON)
    if muon and o.implementation == "fused_opt_states_bf16":
        yield "implementation", 'Muon keeps its momentum in the type of the parameters: take "fused"'


def float8(c: Any) -> Refusals:
    """Yield what the float8 options contradict in themselves."""
    # A filter alone stands in jobs of torchtitan, which has another switch.
    gather, scales = "enable_fsdp_float8_all_gather", "precompute_float8_dynamic_scale_for_fsdp"
    yield from needs(c, "recipe_name", RECIPES, "filter_unaligned", "emulate", gather, scales)
    if c.enable_fsdp_float8_all_gather and c.recipe_name != "tensorwise":
        yield (
            gather,
            f'a weight that is gathered in float8 has one scale, and recipe_name = "{c.recipe_name}" has one a row: '
            "take tensorwise, or gather in high precision",
        )
    yield from needs(c, gather, (True,), scales)


def lora(c: Any) -> Refusals:
    """Yield what [lora] contradicts in itself."""
    names = ("alpha", "dropout", "quantize_base", "target_modules", "exclude_modules", "modules_to_save")
    if c.rank is None:
        for name in names:
            if get(c, name) != default(c, name):
                yield (
                    name,
                    "it does nothing without lora.rank, which switches adapters on: set that, or leave this out",
                )
