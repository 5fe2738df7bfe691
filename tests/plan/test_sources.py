"""The sources of a plan: a user's plan in each of its forms, the registered plan, a kept plan; and what each refuses."""

import os
import re
import time
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel
from transformers import PretrainedConfig

from tests.support.plain_proofs import verify_plain
from tests.support.refusals import refusal
from tests.support.tiny_model import Tiny, TinyPlan
from titanplans import Degrees, PlanError, TPOptions, add_adapters, check_plan, modeling, verify
from titanplans.config import FSDP2Config, LoRA, OptionError
from titanplans.config.schema import build_job
from titanplans.integrations.automodel import RegisteredPlan
from titanplans.parallel.parallelize import dry_run
from titanplans.plan.custom import find_plan, resolve_plan
from titanplans.plan.kept import facts_of, file_for, keep_plan, kept_plan

PLAIN = {"sequence_parallel": False, "loss_parallel": False}

BLOCKS = {
    "model.layers.*.self_attn.[qkv]_proj": ColwiseParallel(),
    "model.layers.*.self_attn.o_proj": RowwiseParallel(),
    "model.layers.*.mlp.gate_proj": ColwiseParallel(),
    "model.layers.*.mlp.up_proj": ColwiseParallel(),
    "model.layers.*.mlp.down_proj": RowwiseParallel(),
}
AUTOMODEL = {
    "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
    **BLOCKS,
    "lm_head": ColwiseParallel(output_layouts=Replicate()),
}
"""A plan as NeMo Automodel writes it for Llama, without sequence parallelism: norms have no key."""
QK_NORMS = {"model.layers.*.self_attn.[qk]_norm": SequenceParallel(sequence_dim=2, use_local_output=True)}


def automodel_plan():
    return AUTOMODEL


def with_arguments(model):
    return AUTOMODEL


def no_plan():
    return 3


def small(name, **overrides):
    return modeling.load_config(name, "debug", num_hidden_layers=1, **overrides)


@pytest.mark.parametrize(
    ("name", "plan"), [("llama", AUTOMODEL), ("qwen3", AUTOMODEL | QK_NORMS), ("llama", BLOCKS)]
)
def test_a_dict_of_torch_s_styles_alone_is_proved(name, plan):
    """Modules that the dict leaves out are replicated."""
    report = verify_plain(partial(modeling.build_real, small(name)), plan, degrees=[2], **PLAIN)
    assert report.passed, report.table()


def test_a_dict_of_torch_s_styles_is_proved_under_every_condition_but_a_loss_in_the_head():
    report = verify(partial(modeling.build_real, small("llama")), AUTOMODEL, degrees=[2, 4], **PLAIN)
    assert report.passed, report.table()
    assert (
        "a loss that the head computes: lm_head has a style of torch's (ColwiseParallel)" in report.uncovered
    )


def test_logits_of_torch_s_styles_may_stay_sharded():
    plan = AUTOMODEL | {"lm_head": ColwiseParallel(use_local_output=False)}
    make = partial(modeling.build_real, small("llama"))
    report = verify_plain(make, plan, degrees=[2], sequence_parallel=False, loss_parallel=True)
    assert report.passed, report.table()


SHARDED = {"model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))}


@pytest.mark.parametrize(
    ("name", "plan", "options", "message"),
    [
        ("qwen3", AUTOMODEL, PLAIN, r"'model.layers.0.self_attn.q_norm' \(Qwen3RMSNorm\) has no style, but"),
        ("llama", AUTOMODEL, {"loss_parallel": False}, "sequence_parallel = True: a dict of torch's styles"),
        (
            "llama",
            AUTOMODEL,
            {"sequence_parallel": False},
            "'lm_head': loss_parallel = True needs logits that",
        ),
        ("llama", AUTOMODEL | {"lm_head": ColwiseParallel()}, PLAIN, "loss_parallel = False needs logits"),
        ("llama", BLOCKS, {"sequence_parallel": False}, "'lm_head': loss_parallel = True needs logits that"),
        ("llama", AUTOMODEL | SHARDED, PLAIN, "'model.embed_tokens' .* its output is sharded over the seq"),
        ("llama", AUTOMODEL | {"model.layers.*.mlp.up": ColwiseParallel()}, PLAIN, "matches no module"),
        ("llama", BLOCKS | {"lm_head": "colwise_rep"}, PLAIN, "'colwise_rep': no such style; there are"),
        ("llama", {k: s for k, s in BLOCKS.items() if "down" not in k}, PLAIN, "down_proj' .* has no style"),
        # Strings are styles of titanplans, which need regions.
        ("llama", AUTOMODEL | {"model.norm": "replicated_on_stream"}, PLAIN, "covered by no key"),
    ],
)
def test_what_torch_s_styles_can_not_honour_is_refused(name, plan, options, message):
    model = modeling.build(small(name))
    assert re.search(message, refusal(check_plan, model, Degrees(tp=2), plan=plan, **options))


def test_torch_s_styles_need_equal_shards_and_untied_weights():
    model = modeling.build(small("llama", intermediate_size=97))
    message = refusal(check_plan, model, Degrees(tp=2), plan=AUTOMODEL, **PLAIN)
    assert "tensor_parallel_degree = 2 does not divide out_features = 97" in message
    make = partial(modeling.build_real, small("llama", tie_word_embeddings=True))
    message = refusal(check_plan, make(), Degrees(tp=2), plan=AUTOMODEL, **PLAIN)
    assert message.startswith(
        "model.embed_tokens.weight and lm_head.weight are tied, and torch's styles would"
    )
    report = verify_plain(make, BLOCKS, degrees=[2], **PLAIN)
    assert report.passed, report.table()


def test_torch_s_styles_share_no_heads():
    model = modeling.build(small("qwen3", num_key_value_heads=1))
    message = refusal(check_plan, model, Degrees(tp=2), plan=AUTOMODEL | QK_NORMS, **PLAIN)
    assert message.startswith("tensor_parallel_degree = 2 does not divide num_key_value_heads = 1 (")


@pytest.mark.parametrize("path", [f"{__name__}:AUTOMODEL", f"{__name__}:automodel_plan", automodel_plan])
def test_a_plan_may_be_a_function_that_returns_a_dict(path):
    model = modeling.build(small("llama"))
    styles = check_plan(model, Degrees(tp=2), plan=path, **PLAIN)
    assert styles["lm_head"] is AUTOMODEL["lm_head"]
    dotted = path.replace(":", ".") if isinstance(path, str) else path  # as NeMo Automodel writes it
    assert check_plan(model, Degrees(tp=2), plan=dotted, **PLAIN).keys() == styles.keys()


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (with_arguments, "is called without arguments (missing a required argument: 'model')"),
        (no_plan, "neither a TPPlan class, nor a dict of module names and styles, nor a function"),
        (f"{__name__}.absent", "has no absent"),
        ("no_such_package.plan", "no module named 'no_such_package'"),
    ],
)
def test_other_functions_are_refused(plan, message):
    assert message in refusal(find_plan, plan, Tiny(), kind=PlanError)


@pytest.mark.parametrize(
    ("plan", "origin"),
    [
        (None, "registered LlamaPlan (plans/hf/llama.py)"),
        ("mistral", "registered LlamaPlan (plans/hf/llama.py), named by plan = 'mistral'"),
        (f"{__name__}:AUTOMODEL", f"user's {__name__}:AUTOMODEL"),
        (AUTOMODEL, "user's dict of styles"),
        (TinyPlan, "user's tests.support.tiny_model:TinyPlan"),
    ],
)
def test_a_plan_says_where_it_is_from(plan, origin):
    model = modeling.build(small("llama"))
    assert resolve_plan(plan, model, TPOptions(Degrees(tp=2))).origin == origin


def test_a_model_without_a_plan_is_refused_with_the_three_sources():
    message = refusal(check_plan, Tiny(), Degrees(tp=2))
    for words in ("[model] plan = ", "@register_plan('tiny')", "derive = true", "titanplans derive MODEL"):
        assert words in message


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "mixtral"])
def test_registered_plans_split_the_projections_that_transformers_splits(name):
    """transformers' own table chooses the same style for each projection; its strings for experts are different."""
    config = small(name)
    styles = check_plan(modeling.build(config), Degrees(tp=2))
    expected = {
        f"model.{key.replace('*', '0')}": kind
        for key, kind in config.base_model_tp_plan.items()
        if kind in ("colwise", "rowwise") and ".experts." not in key
    }
    kinds = {"Colwise": "colwise", "KVColwise": "colwise", "Rowwise": "rowwise"}
    assert {key: kinds.get(type(styles[key]).__name__) for key in expected} == expected
    assert len(expected) >= 4


# Kept plans.

TEXT = "from tests.support.tiny_model import TinyPlan\n\n\nclass KeptPlan(TinyPlan):\n    pass\n"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "titanplans" / "plans"


class KeptPlan(TinyPlan):
    pass


def test_a_kept_plan_is_used_only_if_it_is_allowed(cache):
    model = Tiny()
    assert str(cache) in refusal(check_plan, model, Degrees(tp=2), derive=True, kind=PlanError)
    file = keep_plan(facts_of(model), KeptPlan, TEXT, "1 case at tp 2")
    assert [*cache.iterdir()] == [file]
    styles = check_plan(model, Degrees(tp=2), derive=True)
    assert styles.keys() == check_plan(model, Degrees(tp=2), plan=TinyPlan).keys()
    plan = resolve_plan(None, model, TPOptions(Degrees(tp=2)), derive=True)
    assert plan.origin == f"derived KeptPlan, proved in 1 case at tp 2, kept in {file}"
    assert "no plan is registered for Tiny" in refusal(check_plan, model, Degrees(tp=2))
    assert verify(Tiny, find_plan(None, model, derive=True), degrees=[2], conditions="plain").passed


def test_a_registered_plan_comes_before_a_kept_one():
    model = modeling.build(small("llama"))
    assert find_plan(None, model, derive=True).origin == "registered LlamaPlan (plans/hf/llama.py)"


def test_a_kept_file_that_was_changed_is_refused():
    model = Tiny()
    file = keep_plan(facts_of(model), KeptPlan, TEXT, "1 case at tp 2")
    file.write_text(file.read_text().replace("pass", "mlp_in = ()"))
    assert f"{file} was changed after its plan was proved" in refusal(kept_plan, model)
    file.write_text("")
    assert f"{file} was changed after its plan was proved" in refusal(kept_plan, model)


class Wider(Tiny):
    """A subclass of Tiny without changes, which is defined in another file than Tiny."""


def test_a_kept_plan_belongs_to_the_code_of_the_model_and_of_its_base_classes(tmp_path, monkeypatch):
    keep_plan(facts_of(Tiny()), KeptPlan, TEXT, "1 case at tp 2")
    assert kept_plan(Tiny()) is not None
    assert kept_plan(Wider()) is None
    file = tmp_path / "tiny_model.py"
    file.write_text("# changed\n")
    monkeypatch.setattr("tests.support.tiny_model.__file__", str(file))
    assert kept_plan(Tiny()) is None


DAY = 24 * 60 * 60


@pytest.mark.parametrize(
    ("changes", "age", "is_removed"),
    [
        ({"versions": {"torch": "1.0"}}, 2 * DAY, True),
        ({"sources": {"tests.support.tiny_model": "other code"}}, 2 * DAY, True),
        ({"versions": {"torch": "1.0"}}, DAY / 2, False),
        ({"structure": {"blocks": [], "outside": [], "tied": []}}, 2 * DAY, False),
        ({"model": "another.Model", "versions": {"torch": "1.0"}}, 2 * DAY, False),
    ],
    ids=["versions", "code", "young", "structure", "class"],
)
def test_a_new_plan_replaces_those_of_its_class_for_other_code(cache, changes, age, is_removed):
    facts = facts_of(Tiny())
    old = keep_plan(facts | changes, KeptPlan, TEXT, "1 case at tp 2")
    lock = old.with_suffix(".lock")
    lock.touch()
    before = time.time() - age
    os.utime(old, (before, before))
    new = keep_plan(facts, KeptPlan, TEXT, "1 case at tp 2")
    assert {*cache.iterdir()} == ({new} if is_removed else {new, old, lock})


def test_a_changed_file_stays_when_a_new_plan_is_kept(cache):
    facts = facts_of(Tiny())
    old = keep_plan(facts | {"versions": {}}, KeptPlan, TEXT, "1 case at tp 2")
    old.write_text(old.read_text().replace("pass", "mlp_in = ()"))
    os.utime(old, (0, 0))
    new = keep_plan(facts, KeptPlan, TEXT, "1 case at tp 2")
    assert {*cache.iterdir()} == {new, old}


SAME = {
    "hidden_size": 128,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}
OTHER = {
    "tie_word_embeddings": True,
    "attention_bias": True,
    "mlp_bias": True,
    "hidden_act": "gelu",
    "attention_dropout": 0.1,
}


@pytest.mark.parametrize("field", [*SAME, *OTHER])
def test_a_kept_plan_is_for_a_structure_of_any_size(field):
    base = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    one, two = (
        file_for(facts_of(modeling.build(modeling.load_config("llama", "debug", **base | changes))))
        for changes in ({}, {field: (SAME | OTHER)[field]})
    )
    assert (one == two) == (field in SAME)


def layers(*kinds):
    return {"num_hidden_layers": len(kinds), "layer_types": [f"{kind}_attention" for kind in kinds]}


def test_kinds_of_layers_belong_to_the_structure_and_their_order_and_number_do_not():
    def file(*kinds):
        config = modeling.load_config("gemma2", "debug", **layers(*kinds))
        return file_for(facts_of(modeling.build(config)))

    assert file("sliding", "full") == file("sliding", "full", "sliding", "full")
    assert file("sliding", "full") != file("full", "full")


def test_experts_and_norms_of_queries_belong_to_the_structure():
    files = {
        file_for(facts_of(modeling.build(modeling.load_config(name, "debug")))).name.rpartition("-")[2]
        for name in ("llama", "qwen3", "qwen3_moe", "mixtral")
    }
    assert len(files) == 4


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model.derive": True}, "model.derive = true: .*splits nothing"),
        (
            {"model.derive": True, "model.plan": "gla", "parallelism.tensor_parallel_degree": 2},
            "model.derive = true: has no effect, since the option plan is set",
        ),
    ],
)
def test_derive_is_refused_where_it_has_no_effect(values, message):
    with pytest.raises(OptionError, match=message):
        build_job(values)


def test_a_strategy_and_an_integration_have_the_same_option():
    assert FSDP2Config(derive=True).derive
    with pytest.raises(OptionError, match="derive = true: has no effect"):
        FSDP2Config(derive=True, plan="gla")
    assert RegisteredPlan(derive=True).derive


def test_adapters_and_float8_do_not_change_the_structure():
    before, model = facts_of(modeling.build(small("llama"))), modeling.build(small("llama"))
    add_adapters(model, LoRA(rank=2, dropout=0.1))
    assert facts_of(model) == before
    model = modeling.build(small("llama"))
    pytest.importorskip("torchao.float8").convert_to_float8_training(model)
    assert facts_of(model) == before


def test_parallelize_finds_a_kept_plan_before_it_converts_the_model():
    """`dry_run` makes the checks of `parallelize`, and changes the model as it does."""
    config = FSDP2Config(derive=True, lora={"rank": 2})

    def check():
        dry_run(Tiny().to("meta"), config, Degrees(tp=2), "cpu")

    assert "none in" in refusal(check, kind=PlanError)
    keep_plan(facts_of(Tiny()), KeptPlan, TEXT, "1 case at tp 2")
    check()
    assert "none in" in refusal(check_plan, Wider(), Degrees(tp=2), derive=True, kind=PlanError)


class InNoFile(nn.Module):
    """A model class without a source file, as if it were defined in a notebook."""

    __module__ = "a_notebook"

    def __init__(self):
        super().__init__()
        self.config, self.weight = PretrainedConfig(), nn.Parameter(torch.zeros(1))


def test_a_class_that_is_in_no_file_has_no_kept_plan():
    assert "InNoFile of a_notebook is in no file" in refusal(kept_plan, InNoFile())
