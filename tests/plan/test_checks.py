"""The checks of a plan: errors are raised before any weight moves, in one line that says what would work."""

import copy
import re
from types import SimpleNamespace

import pytest
import torch
from titanplans.plans.fla.transformer import TransformerPlan
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torchao import quantization

from tests.support.refusals import refusal
from tests.support.tiny_model import MLP, Attention, Tiny, TinyPlan, changed
from titanplans import (
    Degrees,
    PlanError,
    TPOptions,
    apply_plan,
    check_plan,
    find_decoder,
    register_plan,
    registered_plans,
)
from titanplans.loss import FusedLoss, NotFused
from titanplans.plan.custom import RENAMED
from titanplans.plan.plan import prefixed
from titanplans.proof.ranks.fake import fake_ranks
from titanplans.styles.replicated_on_stream import ReplicatedOnStream


def refused(plan, degree=2, model=None, **options) -> str:
    model = model or Tiny()
    before = {name: (id(p), p.data_ptr()) for name, p in model.named_parameters()}
    message = refusal(check_plan, model, Degrees(tp=degree), plan=plan, **options, kind=PlanError)
    with fake_ranks(degree) as mesh, pytest.raises(PlanError):
        apply_plan(model, mesh, plan=plan, **options)
    assert before == {name: (id(p), p.data_ptr()) for name, p in model.named_parameters()}, "something moved"
    return message


NO_STYLE = r"plan key 'layers.0.attn.q_proj' \(Changed\) has .*not a style"


def over(style, *but):
    """Return a function that gives all modules of the mixer `style`, except the keys `but`."""
    names = ("q_proj", "k_proj", "v_proj", "q_norm", "o_proj")
    return lambda plan: {name: getattr(plan, style)() for name in names} | dict.fromkeys(but)


WHOLE = changed(TinyPlan, over("replicated_on_stream", ""))
REFUSED = {
    "a key that matches nothing": (
        changed(TinyPlan, lambda plan: {"qq_proj": plan.colwise()}),
        ".*'layers.0.attn.qq_proj'.*Changed.*q_proj, k_proj, v_proj, o_proj, q_norm",
    ),
    "a parameter without a key": (
        changed(TinyPlan, lambda plan: {"q_norm": None}),
        r"parameter 'layers\.\*\.attn\.q_norm\.weight' \(4,\) of RMSNorm is covered by no key of Changed: "
        r".*add 'layers\.\*\.attn\.q_norm' with.*replicated_in_region\(\)",
    ),
    "all parameters without a key": (
        changed(
            TinyPlan,
            lambda plan: {"q_norm": None, "o_proj": None},
            model=lambda plan: {"layers.1.attn.o_proj": plan.rowwise(), "norm": None},
        ),
        r"parameters 'layers\.0\.attn\.o_proj\.weight' \(16, 16\) of Linear, 'layers\.0\.attn\.o_proj\.bias' \(16,\) of "
        r"Linear, 'layers\.\*\.attn\.q_norm\.weight' \(4,\) of RMSNorm, 'norm\.weight' \(16,\) of RMSNorm are covered by "
        r"no key of Changed: add 'layers\.0\.attn\.o_proj', 'layers\.\*\.attn\.q_norm', 'norm' with",
    ),
    "split modules outside a region": (
        changed(TinyPlan, lambda plan: {"": None}),
        r".*'layers.0.attn.q_proj' \(Colwise on Linear\).*attn_input\(\)",
    ),
    "a region that nothing leaves": (
        changed(TinyPlan, lambda plan: {"o_proj": plan.rowwise(reduce_output=False)}),
        ".*opens a region whose partial output is never summed",
    ),
    "a region that splits nothing": (
        changed(TinyPlan, lambda plan: over("replicated_in_region")(plan) | plan.attn_region()),
        r".*opens a region without a rowwise\(\)",
    ),
    "a region that is left twice": (changed(TinyPlan, lambda plan: plan.attn_region()), ".*once per rank"),
    "no style": (changed(TinyPlan, lambda plan: {"q_proj": "colwise"}), NO_STYLE),
    "None for a style": (
        changed(TinyPlan, attn_plan=lambda self, attn: TinyPlan.attn_plan(self, attn) | {"q_proj": None}),
        NO_STYLE,
    ),
    "a class of styles": (changed(TinyPlan, lambda plan: {"q_proj": ColwiseParallel}), NO_STYLE),
    "a pattern that matches nothing": (
        changed(TinyPlan, mlp=lambda plan: {"experts.*.w1": plan.colwise()}),
        r".*'layers.0.mlp.experts.\*.w1' \(Changed\) matches no module",
    ),
    "a name and a pattern": (
        changed(TinyPlan, mlp=lambda plan: {"*_proj": plan.colwise()}),
        r".*'layers.0.mlp.gate_proj' and 'layers.0.mlp.\*_proj' both match",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_plan_that_is_wrong_is_refused(name):
    plan, message = REFUSED[name]
    assert re.match(message, refused(plan))


ONLY_ON_REPLICATED_STREAM = {
    "a head": (
        changed(TinyPlan, model=lambda plan: {"lm_head": plan.replicated_on_stream()}),
        r"plan key 'lm_head' \(ReplicatedOnStream on Linear\): it makes the logits.*give it vocab_head\(\)$",
    ),
    "a mixer": (WHOLE, r".*the mixer layers.0.attn \(Attention\) is in no region"),
    "an embedding of torch's": (
        changed(TinyPlan, model=lambda plan: {"embed": RowwiseParallel(input_layouts=Replicate())}),
        r".*'embed' \(RowwiseParallel on Embedding\): with sequence",
    ),
}


@pytest.mark.parametrize("name", ONLY_ON_REPLICATED_STREAM)
def test_styles_that_need_a_replicated_stream_are_refused_if_ranks_have_different_tokens(name):
    plan, message = ONLY_ON_REPLICATED_STREAM[name]
    assert re.match(message, refused(plan))
    check_plan(Tiny(), Degrees(tp=2), plan=plan, sequence_parallel=False)


@pytest.mark.parametrize("quantisation", ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig"])
def test_weights_quantised_by_torchao_are_refused(quantisation):
    model = Tiny()
    quantization.quantize_(model, getattr(quantization, quantisation)())
    message = refused(TinyPlan, model=model)
    kind = "Int8Tensor" if "Int8" in quantisation else "Float8Tensor"
    assert f"weight' is torchao's {kind}, whose quantised values" in message
    assert "before quantize_" in message


def test_a_correct_plan_is_accepted_and_complete():
    model = Tiny()
    names = list(model.state_dict())
    with fake_ranks(2) as mesh:
        styles = apply_plan(model, mesh, plan=TinyPlan).styles
        assert all(isinstance(p, DTensor) for p in model.parameters())
        assert list(model.state_dict()) == names
        assert model.layers[0].attn.q_proj.weight.shape == (8, 16), "module.weight returns the local tensor"
        assert model.layers[0].attn._get_name() == "SplitAttention"
        assert "SplitLinear(" in repr(model)
        assert "local weight [8, 16]" in repr(model)
        assert isinstance(model.layers[0].attn.q_proj, nn.Linear)
    assert set(styles) >= {"embed", "layers.1.attn.q_norm", "layers.0.mlp", "norm", "lm_head"}


NAMES_ITS_HEAD = changed(TinyPlan, model=lambda plan: {"head": plan.vocab_head()})


class HeadRenamed(Tiny):
    """A model whose head has an unusual name."""

    def __init__(self):
        super().__init__()
        self.head = self.lm_head
        del self.lm_head


def test_the_plan_names_the_head():
    model = HeadRenamed()
    with pytest.raises(NotFused, match=r"gives vocab_head\(\) to no module"):
        FusedLoss(model)
    message = refused(TinyPlan, model=model)
    assert message.endswith(
        "add 'head' with a style. 'head' makes the logits: give it vocab_head() in model_plan"
    )
    check_plan(model, Degrees(tp=2), plan=NAMES_ITS_HEAD)
    assert find_decoder(model).head == "head"
    assert FusedLoss(model).head is model.head
    with fake_ranks(2) as mesh:
        applied = apply_plan(model, mesh, plan=NAMES_ITS_HEAD)
        assert (applied.decoder.head, find_decoder(model).head) == ("head", "head")
    model = HeadRenamed()
    check_plan(model, Degrees(tp=2), plan=NAMES_ITS_HEAD)
    assert "'head.weight'" in refused(TinyPlan, model=model), "a plan does not use the keys of another"


def test_an_explicit_plan_overrides_registered_mixers():
    @register_plan("test_strict", mixer="tests.support.tiny_model.Attention")
    class Other(TinyPlan):
        def attn_plan(self, attn):
            raise AssertionError("not asked")

    check_plan(Tiny(), Degrees(tp=2), plan=TinyPlan)


@pytest.mark.parametrize(
    ("option", "value"), [("max_norm", 1.0), ("scale_grad_by_freq", True), ("sparse", True)]
)
def test_embedding_options_that_prevent_sharding_are_refused(option, value):
    model = Tiny()
    model.embed = nn.Embedding(32, 16, **{option: value})
    assert f"{option} = {value}" in refused(TinyPlan, model=model)


def test_logits_to_keep_are_refused_where_each_shard_would_count_them():
    with fake_ranks(2) as mesh:
        model = Tiny()
        apply_plan(model, mesh, plan=TinyPlan)
        with pytest.raises(PlanError, match="logits_to_keep = 1"):
            model(torch.zeros(1, 4, dtype=torch.long), logits_to_keep=1)


def test_indivisible_heads_name_the_degrees_that_work():
    message = refused(TinyPlan, degree=3)
    assert message.startswith(
        "tensor_parallel_degree = 3 does not divide num_heads = 4 (layers.0.attn, Attention)"
    )
    assert message.endswith("1, 2 or 4 would work, or num_heads = 3 or 6")


def test_a_rank_without_a_shard_is_refused():
    model = Tiny()
    model.embed, model.lm_head = nn.Embedding(9, 16), nn.Linear(16, 9, bias=False)
    for layer in model.layers:
        layer.attn = Attention(heads=8)
    message = refused(TinyPlan, degree=8, model=model)  # shards of 2, 2, 2, 2, 1, 0, 0, 0
    assert "of dimension 0 of weight = 9 (embed, Embedding)" in message
    assert message.endswith("1 or 2 would work, or a size of 16")


def test_a_split_mixer_with_an_unknown_number_of_heads_is_refused():
    """Without the number of heads, the number of key/value heads is not checked against the degree either."""
    model = Tiny()
    for layer in model.layers:
        del layer.attn.num_heads, layer.attn.num_kv_heads
    message = refused(TinyPlan, degree=2, model=model)
    assert "'layers.0.attn.q_proj' (Colwise on Linear): it splits the mixer" in message
    assert "num_heads or num_attention_heads" in message
    assert "set head_names in TinyPlan" in message

    for layer in model.layers:
        layer.attn.num_key_value_heads = (
            4  # the number of heads does not follow from the number of key/value heads
        )
    assert refused(TinyPlan, degree=4, model=model) == message

    class Counted(TinyPlan):
        def heads(self, attn):
            return {"channels / 4": 4}

    check_plan(model, Degrees(tp=4), plan=Counted)
    assert "does not divide channels / 4 = 4" in refused(Counted, degree=8, model=model)

    check_plan(model, Degrees(tp=2), plan=WHOLE, sequence_parallel=False)  # the mixer is replicated


def test_heads_under_mixed_names_and_in_the_config():
    plan = TinyPlan(TPOptions(Degrees(tp=4)))
    mixer = nn.Module()
    mixer.num_heads, mixer.config = 8, SimpleNamespace(num_attention_heads=16, num_key_value_heads=2)
    assert plan.heads(mixer) == {"num_heads": 8, "num_key_value_heads": 2}
    assert plan.kv_heads(mixer) == 2
    mixer.num_key_value_groups = 4
    assert plan.queries_per_group(mixer) == {"num_key_value_groups": 2}, "two ranks share a head of 4 queries"
    del mixer.num_heads
    mixer.num_key_value_heads = 2
    assert plan.heads(mixer) == {"num_attention_heads": 16, "num_key_value_heads": 2}
    mixer.config = None
    assert plan.queries_per_group(mixer) == {}, "no number is divisible; the checks refuse it"


def test_tied_weights_with_two_layouts_are_refused():
    plan = changed(TinyPlan, model=lambda plan: {"lm_head": plan.replicated_off_stream()})
    message = refused(plan, model=Tiny(tied=True))
    assert "embed.weight (Shard(dim=0)) and lm_head.weight (Replicate()) are tied" in message


class Renamed(nn.Module):
    """A block with unusual names of mixer and MLP, and the MLP registered first."""

    def __init__(self, heads=4):
        super().__init__()
        self.feed, self.token_mixing = MLP(), Attention(heads)
        self.norm1, self.norm2 = nn.RMSNorm(16), nn.RMSNorm(16)

    def forward(self, x):
        x = x + self.token_mixing(hidden_states=self.norm1(x))
        return x + self.feed(self.norm2(x))


class RenamedPlan(TinyPlan):
    def layer_plan(self, layer):
        plan = super().layer_plan(layer)
        plan |= prefixed("token_mixing", self.attn_plan(layer.token_mixing))
        return plan | prefixed("feed", self.mlp_plan(layer.feed))


def test_a_mixer_with_an_unusual_name_is_found_by_its_region():
    model = Tiny()
    model.layers = nn.ModuleList(Renamed(heads=4) for _ in range(2))
    with fake_ranks(2) as mesh:
        applied = apply_plan(copy.deepcopy(model), mesh, plan=RenamedPlan)
    assert list(applied.decoder.mixers) == ["layers.0.token_mixing", "layers.1.token_mixing"]
    assert "8 does not divide num_heads = 4 (layers.0.token_mixing, Attention)" in refused(
        RenamedPlan, degree=8, model=model
    )
    for layer in model.layers:
        del layer.token_mixing.num_heads, layer.token_mixing.num_kv_heads
    assert "whose head count is unknown" in refused(RenamedPlan, model=model)


def test_the_applied_plan_is_returned():
    model = Tiny()
    with fake_ranks(2) as mesh:
        applied = apply_plan(model, mesh, plan=TinyPlan)
        assert applied.mesh is mesh
    assert set(applied.layouts) == {name for name, _ in model.named_parameters()}
    assert applied.layouts["layers.0.attn.q_norm.weight"].gradient == Partial()
    assert applied.layouts["layers.0.attn.o_proj.weight"].placement == Shard(1)
    assert isinstance(applied.styles["norm"], ReplicatedOnStream)
    assert applied.plan.options == TPOptions(Degrees(tp=2))
    assert (applied.decoder.names, applied.crossings) == (("layers.0", "layers.1"), {})


def test_the_structure_of_a_decoder_is_found():
    decoder = find_decoder(Tiny())
    block = decoder.blocks[1]
    assert (decoder.embedding, decoder.norm, decoder.head, decoder.towers) == ("embed", "norm", "lm_head", ())
    assert (block.name, block.mixers, block.mlps) == ("layers.1", ("layers.1.attn",), ("layers.1.mlp",))
    assert block.norms == ("layers.1.attn_norm", "layers.1.mlp_norm")
    assert block.kind == "Block (Attention, MLP)"
    assert decoder.mixer_around("layers.1.attn.q_proj") == "layers.1.attn"
    assert decoder.mixer_around("layers.1.attn") is decoder.mixer_around("layers.1.mlp.up_proj") is None
    renamed = Tiny()
    renamed.stages = renamed._modules.pop("layers")
    assert find_decoder(renamed).names == ("stages.0", "stages.1"), "the only list of modules"
    assert find_decoder(nn.Linear(1, 1), required=False).blocks == ()
    with pytest.raises(PlanError, match=r"Linear has no ModuleList of blocks"):
        find_decoder(nn.Linear(1, 1))


def test_more_ranks_than_key_value_heads_need_kv_colwise():
    model = Tiny()
    for layer in model.layers:
        layer.attn.num_kv_heads = 2
    message = refused(TinyPlan, degree=4, model=model)
    assert "does not divide num_kv_heads = 2 (layers.0.attn, Attention)" in message
    assert "kv_colwise()" in message
    attn = model.layers[0].attn
    plan = changed(TinyPlan, lambda plan: {n: plan.kv_colwise(attn) for n in ("k_proj", "v_proj")})
    check_plan(model, Degrees(tp=4), plan=plan)
    for layer in model.layers:
        layer.attn.num_kv_heads = 3
    assert refused(plan, degree=4, model=model).endswith("1 would work, or num_kv_heads = 1, 2 or 4")


def test_an_unregistered_architecture_is_refused():
    message = refused(None)
    assert "(model_type = 'tiny')" in message
    assert ", ".join(sorted(registered_plans())) in message


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nope", "not registered"),
        ("no_such_module:Plan", "no module named 'no_such_module'"),
        ("titanplans:Nope", "has no Nope"),
        ("titanplans.plans.hf.llama:LamaPlan", "has no LamaPlan; did you mean LlamaPlan? ("),
        ("titanplans:apply_plan", "neither a TPPlan class nor a dict"),
    ],
)
def test_custom_plans_that_can_not_be_imported_are_refused(name, message):
    assert message in refused(name)


def test_a_plan_may_be_a_dict():
    patterns = {
        "embed": "vocab_embedding",
        "layers.*.*_norm": "replicated_on_stream",
        "layers.*.attn": "attn_input",
        "layers.*.attn.[qkv]_proj": "colwise",
        "layers.*.attn.q_norm": "replicated_in_region",
        "layers.*.attn.o_proj": "rowwise",
        "layers.*.mlp": "mlp_input",
        "layers.*.mlp.gate_proj": "colwise",
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
        "norm": "replicated_on_stream",
        "lm_head": "vocab_head",
    }
    by_class = check_plan(Tiny(), Degrees(tp=2), plan=TinyPlan)
    by_dict = check_plan(Tiny(), Degrees(tp=2), plan=patterns)
    assert {k: repr(v) for k, v in by_class.items()} == {k: repr(v) for k, v in by_dict.items()}
    assert "plan key 'layers.*.attn.w_proj'" in refused(patterns | {"layers.*.attn.w_proj": "colwise"})
    assert "both match layers.0.attn.q_proj" in refused(patterns | {"layers.0.attn.q_proj": "colwise"})
    assert "no such style" in refused(patterns | {"norm": "columnwise"})
    for old, new in RENAMED.items():
        assert f"'norm' = '{old}': this style is now called '{new}'" in refused(patterns | {"norm": old})


def test_a_plan_in_python_takes_patterns_as_a_dict_does():
    plan = changed(
        TinyPlan,
        lambda plan: dict.fromkeys(("q_proj", "k_proj", "v_proj")) | {"[qkv]_proj": plan.colwise()},
        model=lambda plan: {"layers.*.mlp.*_proj.bias": plan.replicated_in_region()},
    )
    by_pattern, by_name = (check_plan(Tiny(), Degrees(tp=2), plan=plan) for plan in (plan, TinyPlan))
    biases = {f"layers.{n}.mlp.{name}_proj.bias" for n in range(2) for name in ("gate", "up", "down")}
    assert by_pattern.keys() - by_name.keys() == biases
    assert {k: repr(v) for k, v in by_pattern.items() if k in by_name} == {
        k: repr(v) for k, v in by_name.items()
    }


def test_tied_weights_stay_tied():
    model = Tiny(tied=True)
    with fake_ranks(2) as mesh:
        apply_plan(model, mesh, plan=TinyPlan)
        assert model.lm_head._parameters["weight"] is model.embed._parameters["weight"]


def test_a_style_of_torch_works_and_is_checked_for_completeness():
    theirs = ColwiseParallel(input_layouts=Shard(1), use_local_output=False)

    class Idle(ColwiseParallel):
        def _apply(self, module, device_mesh):
            return module

    with fake_ranks(2) as mesh:
        model = Tiny()
        apply_plan(model, mesh, plan=changed(TinyPlan, model=lambda plan: {"lm_head": theirs}))
        assert model(torch.zeros(1, 4, dtype=torch.long)).logits.shape == (1, 4, 32)
        with pytest.raises(PlanError, match=r"'lm_head' \(Idle on Linear\): .*'lm_head.weight' a plain"):
            apply_plan(Tiny(), mesh, plan=changed(TinyPlan, model=lambda plan: {"lm_head": Idle()}))


def test_a_second_application_is_refused():
    with fake_ranks(2) as mesh:
        model = Tiny()
        apply_plan(model, mesh, plan=TinyPlan)
        with pytest.raises(PlanError, match="is already a DTensor"):
            apply_plan(model, mesh, plan=TinyPlan)


def test_labels_are_refused_where_the_loss_of_the_model_would_be_wrong():
    tokens = torch.zeros(1, 4, dtype=torch.long)
    with fake_ranks(2) as mesh:
        model = Tiny()
        apply_plan(model, mesh, plan=TinyPlan)
        with pytest.raises(PlanError, match="loss_parallel = False"):
            model(tokens, labels=tokens)


def test_a_name_is_registered_once():
    with pytest.raises(PlanError, match=r"taken by titanplans.plans.fla.transformer.TransformerPlan"):
        register_plan("transformer")(TinyPlan)
    assert registered_plans()["transformer"] is TransformerPlan


def test_former_names_of_plan_methods_are_refused_with_the_new_names():
    class FormerPlan(TinyPlan):
        def local_attributes(self, attn):
            return self.divided(attn, "num_heads")

    with pytest.raises(PlanError, match=r"uses self\.divided, which is now called self\.divide_by_degree"):
        check_plan(Tiny(), Degrees(tp=2), plan=FormerPlan)
