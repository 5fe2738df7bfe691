"""Contradictions within one group of options."""

import re
from typing import Any

from titanplans.config.options import Refusals, default, fields, get, needs
from titanplans.errors import near_multiples

_RECOMPUTING = ("full", "selective", "mlp", "keep_mixer")
WITH_ATTENTION = ("full", "selective", "keep_mixer")
RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")


def activation_checkpoint(c: Any) -> Refusals:
    """Yield the contradictions within [activation_checkpoint]."""
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
            'it lists exceptions to per_op_sac_matmuls, but that is "none"; remove one of the two',
        )
    kept = (c.per_op_sac_keep_attention, c.per_op_sac_keep_collectives, c.per_op_sac_keep_operators)
    if c.per_op_sac_matmuls == "none" and not any(kept):
        yield (
            "per_op_sac_matmuls",
            'no other operator is kept either; set mode = "full", or add operators to keep',
        )


def compiled(c: Any) -> Refusals:
    """Yield the contradictions within [compile]."""
    if c.enable and not c.components:
        yield "components", 'no component is listed; list "model", "loss" or "optimizer"'
    if len(set(c.components)) < len(c.components):
        yield "components", "duplicate entry; keep one of them"
    if c.enable and c.fullgraph and "optimizer" in c.components:
        yield (
            "fullgraph",
            'the optimizer step compiles to several graphs; remove fullgraph, or "optimizer" from components',
        )
    if c.enable and c.mode is not None and c.options is not None:
        yield "options", "compile.mode and compile.options exclude each other; keep one of them"


def loss(c: Any) -> Refusals:
    """Yield the contradictions within [loss]."""
    yield from needs(c, "fused", (True, None), "chunk_tokens")


OF_MUON = ("momentum", "nesterov", "ns_steps", "adjust_lr_fn")
OF_ADAM = ("beta1", "beta2", "eps")
"""Keys of [optimizer] and of its groups that only one kind of optimizer has."""


_ADJUSTABLE = re.compile(
    r"max_position_embeddings|n_positions|sliding_window|window_size|.*rope.*|.*(dropout|pdrop)"
)
"""Fields of a model's config that do not change its weights: sequence length, rope and dropout."""


def plan(c: Any) -> Refusals:
    """Yield the contradictions between the options of a plan."""
    if c.plan is not None and c.derive:
        yield "derive", "has no effect, since the option plan is set, too; remove one of the two"


def model(m: Any) -> Refusals:
    """Yield the contradictions within [model]."""
    for option, others in (("class", ("name", "flavor", "config")), ("config", ("name", "flavor"))):
        redundant = [f"model.{other}" for other in others if getattr(m, other)]
        if get(m, option) is not None and redundant:
            yield option, f"it already names the model; remove {' and '.join(redundant)}"
    yield from plan(m)
    if m.class_ is None and m.arguments is not None:
        yield "arguments", "has no effect unless model.class is set; set it or remove this key"
    others = [key for key in m.config_overrides or () if not _ADJUSTABLE.fullmatch(key)]
    if m.class_ is not None and m.config_overrides is not None:
        yield "config_overrides", "a model set by model.class is built from model.arguments; set those"
    if others:
        why = f"{others[0]} changes the model, and only lengths, rope and dropout may change here; put it in model.config"
        yield "config_overrides", why


def training(t: Any) -> Refusals:
    """Yield the contradictions within [training]."""
    size = t.global_batch_size
    if size != -1 and t.gradient_accumulation_steps != 1:
        why = f"training.global_batch_size = {size} already fixes the accumulation; keep one of them"
        yield "gradient_accumulation_steps", why
    if size != -1 and size % t.local_batch_size:
        works = near_multiples(size, t.local_batch_size)
        why = f"it is not a multiple of training.local_batch_size = {t.local_batch_size}; {works} would work"
        yield "global_batch_size", why
    if t.chat.enable and t.text_column != "text":
        yield "text_column", "training.chat is enabled; set training.chat.messages_column instead"
    yield from needs(t, "skip_nan_inf", (True,), "skip_nan_inf_limit")


def chat(c: Any) -> Refusals:
    """Yield the contradictions within [training.chat]."""
    yield from needs(c, "enable", (True,), *fields(type(c)))


def source(s: Any) -> Refusals:
    """Yield the contradictions within a table of [[data.sources]]."""
    if s.chat.enable and s.text_column != "text":
        yield (
            "text_column",
            "its chat is enabled; set messages_column in [data.sources.chat] instead",
        )


def data(d: Any) -> Refusals:
    """Yield the contradictions within [data]."""
    yield from needs(d, "packing", ("best_fit",), "long_documents")
    titles = [source.title for source in d.sources]
    if duplicates := [title for title in dict.fromkeys(titles) if titles.count(title) > 1]:
        yield "sources", f"duplicate {', '.join(duplicates)}; set a different name for each source"
    if d.sources and not any(source.weight for source in d.sources):
        yield "sources", "all sources have weight 0, so there is no data; give one of them a weight above 0"


def checkpoint(c: Any) -> Refusals:
    """Yield the contradictions within [checkpoint]."""
    saving = ("create_seed_checkpoint", "save_on_signal", "last_save_in_hf")
    loading = ("initial_load_path", "initial_load_in_hf", "initial_adapter_path", "load_step", "load_only")
    yield from needs(c, "enable", (True,), *loading, *saving, "save_adapters_only")
    for key in (*saving, "enable_first_step_checkpoint"):
        if c.load_only and getattr(c, key):
            yield key, "checkpoint.load_only = true forbids saving; keep one of them"
    if c.save_adapters_only and c.initial_load_path is None and not c.initial_load_in_hf:
        yield (
            "save_adapters_only",
            "the base weights would be lost; set checkpoint.initial_load_path to their source",
        )
    if not c.initial_load_model_only and c.initial_load_path is None:
        yield "initial_load_model_only", "it needs checkpoint.initial_load_path; set it or remove this key"
    if c.create_seed_checkpoint and (c.initial_load_path is not None or c.initial_load_in_hf):
        yield (
            "create_seed_checkpoint",
            "a seed checkpoint holds new initial weights, so nothing is loaded; remove this key or initial_load_path",
        )
    if c.last_save_in_hf and not c.last_save_model_only:
        yield "last_save_in_hf", "a Hugging Face folder holds only weights; set last_save_model_only = true"
    if c.last_save_in_hf and c.create_seed_checkpoint:
        yield (
            "last_save_in_hf",
            "a seed is saved as a distributed checkpoint; convert it with titanplans export",
        )
    if c.initial_load_in_hf and not c.initial_load_model_only:
        yield "initial_load_model_only", "a Hugging Face folder holds only weights; remove this key"


def profiling(p: Any) -> Refusals:
    """Yield the contradictions within [profiling]."""
    terms = f"profiler_warmup + profiler_active = {p.profiler_warmup} + {p.profiler_active}"
    minimum = p.profiler_warmup + p.profiler_active
    if p.enable_profiling and p.profile_freq < minimum:
        yield "profile_freq", f"it is less than {terms}; {minimum} or more would work"


def debug(d: Any) -> Refusals:
    """Yield the contradictions within [debug]."""
    yield from needs(d, "deterministic", (True,), "deterministic_warn_only")


def optimizer_group(g: Any) -> Refusals:
    """Yield the contradictions within a group of [optimizer], and its keys that have no effect."""
    set_keys = [name for name in fields(type(g)) if name != "pattern" and getattr(g, name) is not None]
    if not set_keys:
        yield (
            "pattern",
            "the group sets nothing else, so it has no effect; add a key such as lr, or remove the group",
        )
    for name in OF_ADAM if g.name == "Muon" else OF_MUON if g.name is not None else ():
        if name in set_keys:
            yield name, f'name = "{g.name}" does not use it; remove one of the two'


def optimizer(o: Any) -> Refusals:
    """Yield the contradictions within [optimizer]."""
    has_muon = o.name == "Muon" or any(group.name == "Muon" for group in o.groups)
    if not has_muon:
        yield from needs(o, "name", ("Muon",), *OF_MUON)
    if has_muon and o.implementation == "fused_opt_states_bf16":
        yield "implementation", 'Muon keeps its momentum in the type of the parameters; use "fused"'


def float8(c: Any) -> Refusals:
    """Yield the contradictions within [quantize.linear.float8]."""
    # filter_fqns may be set alone, as in jobs of torchtitan, which enables float8 by another key.
    gather, scales = "enable_fsdp_float8_all_gather", "precompute_float8_dynamic_scale_for_fsdp"
    yield from needs(c, "recipe_name", RECIPES, "filter_unaligned", "emulate", gather, scales)
    if c.enable_fsdp_float8_all_gather and c.recipe_name != "tensorwise":
        yield (
            gather,
            f'a weight gathered in float8 has one scale, but recipe_name = "{c.recipe_name}" has one per row; '
            "use tensorwise, or gather in high precision",
        )
    yield from needs(c, gather, (True,), scales)


def lora(c: Any) -> Refusals:
    """Yield the contradictions within [lora]."""
    names = ("alpha", "dropout", "quantize_base", "target_modules", "exclude_modules", "modules_to_save")
    for name in names:
        if c.rank is None and get(c, name) != default(c, name):
            yield name, "has no effect unless lora.rank is set; set it or remove this key"
