"""Bugs that were shipped, made again as plans and styles: `verify`, or strict application before it, rejects each.

    what was shipped, and by whom                                             test
    q_norm/k_norm gradient not summed (NeMo Automodel #3822, #3857;           test_head_norms_not_summed
        NeMo-RL #3716; AReaL #335)
    Partial gradient labelled Replicate (torchtitan #3412)                    test_partial_gradient_labelled_replicate
    gradient of a shared projection not summed (torchtitan PR #1373)          test_shared_projection_not_summed
    final norm's gradient differs by rank (Megatron-LM #1446)                 test_final_norm_differs_by_rank
    vocabulary not divisible (Megatron-LM #1754)                              test_vocabulary_offset_by_local_rows
    a prefix that hits a module twice (flame #11)                             test_module_hit_twice
    positional layouts for keyword inputs (flame #12)                         test_positional_layouts_for_keyword_inputs
    a key that matches nothing (NeMo Automodel #2589; transformers #37893)    test_key_that_matches_nothing
    replicas counted tp times in the norm (TransformerEngine ROCm #715;       test_replicas_counted_in_the_norm
        NeMo-RL #3788)
    gradients exactly 2x (pytorch #160285)                                    test_gradients_exactly_twice
    replicas that differ after init (NeMo Automodel #1291)                    test_replicas_that_differ_after_init
    loss scaled by 1/tp (NeMo Automodel #1291)                                test_loss_scaled_by_the_ranks
    tied weights untied (NeMo-RL #298, #684, #879; torchtitan #2252)          test_tied_weights_untied
    packed projection split evenly (Megatron-LM #1989; Baichuan)              test_packed_projection_split_evenly
    rows ordered (n h d); decay by local head (FLA under naive colwise)       test_rows_that_are_no_heads,
                                                                              test_decay_by_local_head
    more ranks than key/value heads (torchtitan #932, #2574;                  test_more_ranks_than_key_value_heads
        DeepSpeed #7259)
    clip_grad_norm_ on Tensor and DTensor (transformers #36296;               test_parameter_left_plain
        torchtune #2420)
    positions from a shard's length (transformers)                            test_positions_from_a_shard
    meta-initialised parameters left as garbage (flame #9; FLA #156)          test_garbage_after_meta

All are proved at tp 2 with loss and sequence parallel unless said otherwise.
"""

from functools import partial

import pytest
import torch
from mutants import bugs, faults
from mutants.architectures import ARCHITECTURES
from mutants.place import named
from plainly import verify
from tiny import Tiny, TinyPlan
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel

from titanplans import Degrees, PlanError, check_plan, modeling

MODELS = {architecture.name: architecture for architecture in ARCHITECTURES}


def rejected(build, plan, *, degree=2, sequence_parallel=True):
    """The failing case, and the modules that its report names."""
    report = verify(
        build, plan, degrees=[degree], loss_parallel=True, sequence_parallel=sequence_parallel, seq_len=8
    )
    (case,) = report.cases
    assert not report.passed
    return case, named(case, build())


def failed(case) -> set[str]:
    return {check.what for check in case.checks if not check.passed}


def reason(case) -> str:
    return case.finding.reason


@pytest.mark.parametrize("name", ["qwen3", "gemma3_text"])
def test_head_norms_not_summed(name):
    norms = {norm: lambda plan, style: plan.replicated_off_stream() for norm in ("q_norm", "k_norm")}
    case, where = rejected(MODELS[name].build, bugs.changed(MODELS[name].plan, **norms))
    assert where == {"model.layers.1.self_attn.k_norm"}, "the first of the four that a backward meets"
    assert reason(case) == "each rank has its own share: not summed over the ranks"
    assert not failed(case) & {"loss", "logits"}, "nobody would see it in a loss curve"


def test_partial_gradient_labelled_replicate():
    plan = bugs.changed(TinyPlan, lm_head=lambda plan, style: faults.entry_unsummed(style))
    case, where = rejected(Tiny, plan, sequence_parallel=False)
    assert where == {"norm"}
    assert reason(case) == "each rank has its own share: not summed over the ranks"


def test_shared_projection_not_summed():
    case, where = rejected(partial(bugs.with_mixer, bugs.Latent), bugs.LatentPlan)
    assert where == {"layers.1.attn.k_proj.0"}
    assert reason(case) == "each rank has its own share: not summed over the ranks"


def test_final_norm_differs_by_rank():
    plan = bugs.changed(TinyPlan, norm=lambda plan, style: plan.replicated_off_stream())
    case, where = rejected(Tiny, plan)
    assert where == {"norm"}
    assert "replicas" in failed(case)


def test_vocabulary_offset_by_local_rows():
    def odd():
        model = Tiny()
        model.embed, model.lm_head = nn.Embedding(33, 16), nn.Linear(16, 33, bias=False)
        return model

    assert verify(odd, TinyPlan, degrees=[2], loss_parallel=True, sequence_parallel=True).passed
    plan = bugs.changed(TinyPlan, embed=lambda plan, style: faults.offset_by_local_rows(style))
    case, where = rejected(odd, plan)
    assert where == {"embed"}
    assert "loss" in failed(case)


def test_module_hit_twice():
    plan = {"layers.*.attn.*_proj": "colwise", "layers.*.attn.o_proj": "rowwise"}
    with pytest.raises(PlanError, match=r"both match layers\.0\.attn\.o_proj"):
        verify(Tiny, plan, degrees=[2])

    class Plan(TinyPlan):
        def model_plan(self, model):
            return super().model_plan(model) | {"layers.0.attn.o_proj": self.rowwise()}

    with pytest.raises(PlanError, match=r"'layers\.0\.attn\.o_proj' is given by"):
        verify(Tiny, Plan, degrees=[2])


class Positional(bugs.MixerPlan):
    """Linear attention by torch's own styles, which look for its input at a position."""

    def region(self):
        return PrepareModuleInput(
            input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),), use_local_output=True
        )

    def attn_plan(self, attn):
        split = {name: ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj")}
        return {"": self.region(), **split, "o_proj": RowwiseParallel(output_layouts=Shard(1))}


class ByKeyword(Positional):
    """And this one by its name, which is how the block hands it over."""

    def region(self):
        return PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": Shard(1)},
            desired_input_kwarg_layouts={"hidden_states": Replicate()},
            use_local_output=True,
        )


def test_positional_layouts_for_keyword_inputs():
    model = partial(bugs.with_mixer, bugs.Mixer)
    assert verify(model, ByKeyword, degrees=[2], loss_parallel=True, sequence_parallel=True).passed
    case, where = rejected(model, Positional)
    assert where == {"layers.0.attn"}
    assert failed(case) == {"runs"}
    ours = bugs.changed(bugs.MixerPlan, attn=lambda plan, style: plan.attn_input("x")[""])
    with pytest.raises(
        PlanError,
        match=r"'layers\.0\.attn' \(Region on Mixer\): .*'x' \(got hidden_states\)",
    ):
        verify(model, ours, degrees=[2], sequence_parallel=True)


def test_what_breaks_at_its_entry_is_not_placed_after_its_neighbour():
    case, _ = rejected(partial(bugs.with_mixer, bugs.Mixer), Positional)
    assert case.worst == "runs in layers.0.attn"


def test_key_that_matches_nothing():
    class Plan(TinyPlan):
        def attn_plan(self, attn):
            return super().attn_plan(attn) | {"qkv_proj": self.colwise()}

    with pytest.raises(PlanError, match=r"'layers\.0\.attn\.qkv_proj' .*no module"):
        verify(Tiny, Plan, degrees=[2])


def test_replicas_counted_in_the_norm():
    plan = bugs.changed(TinyPlan, norm=lambda plan, style: bugs.counted_on_every_rank(style))
    case, where = rejected(Tiny, plan, sequence_parallel=False)
    assert where == {"norm"}
    assert {"gradients", "norm"} <= failed(case)


def test_gradients_exactly_twice():
    plan = bugs.changed(TinyPlan, lm_head=lambda plan, style: faults.entry_summed_again(style))
    case, where = rejected(Tiny, plan)
    assert where == {"norm"}
    assert reason(case) == "exactly 2 times too large: once for each rank"
    assert not failed(case) & {"loss", "logits"}, "nobody would see it in a loss curve"


def test_replicas_that_differ_after_init():
    plan = bugs.changed(TinyPlan, mlp_norm=lambda plan, style: bugs.drawn_on_every_rank(style))
    case, where = rejected(Tiny, plan)
    assert where == {"layers.0.mlp_norm"}
    assert "replicas" in failed(case)


def test_loss_scaled_by_the_ranks():
    plan = bugs.changed(TinyPlan, lm_head=lambda plan, style: bugs.loss_over_ranks(style))
    case, where = rejected(Tiny, plan)
    assert where == {"lm_head"}
    assert reason(case) == "exactly 1/2 of it: divided by the number of ranks"


@pytest.mark.parametrize("end", ["embed", "lm_head"])
def test_tied_weights_untied(end):
    plan = bugs.changed(TinyPlan, **{end: lambda plan, style: faults.untied(style)})
    with pytest.raises(PlanError, match=r"embed\.weight and lm_head\.weight were tied"):
        verify(partial(Tiny, tied=True), plan, degrees=[2])


def test_packed_projection_split_evenly():
    """Each rank's rows are right, and their pairs are not: it shows where they have met, in the same MLP."""
    with pytest.raises(PlanError, match=r"gate and up packed .*24 \+ 24"):
        check_plan(bugs.packed(), Degrees(tp=2), plan=bugs.PackedPlan)
    said = bugs.changed(bugs.PackedPlan, gate_up_proj=lambda plan, style: plan.colwise(interleaved=True))
    case, where = rejected(bugs.packed, said)
    assert where == {"layers.0.mlp.down_proj"}
    assert "loss" in failed(case)


def test_rows_that_are_no_heads():
    model = partial(bugs.with_mixer, bugs.TwoKeys)
    case, where = rejected(model, bugs.MixerPlan)
    assert where == {"layers.0.attn.o_proj"}
    assert "loss" in failed(case)


def test_decay_by_local_head():
    assert verify(
        partial(bugs.with_mixer, bugs.Mixer), bugs.MixerPlan, degrees=[2], loss_parallel=True
    ).passed
    case, where = rejected(partial(bugs.with_mixer, bugs.LocalDecay), bugs.MixerPlan)
    assert where == {"layers.0.attn.o_proj"}
    assert "loss" in failed(case)


def test_more_ranks_than_key_value_heads():
    plain = {name: lambda plan, style: plan.colwise() for name in ("k_proj", "v_proj")}
    plan = bugs.changed(MODELS["llama"].plan, **plain)
    with pytest.raises(PlanError, match=r"not divide num_key_value_heads = 2 \(\S*0\.self_attn"):
        verify(MODELS["llama"].build, plan, degrees=[4])


def test_parameter_left_plain():
    plan = bugs.changed(TinyPlan, norm=lambda plan, style: bugs.LeavesPlain())
    with pytest.raises(PlanError, match=r"'norm' \(LeavesPlain on RMSNorm\): .*'norm\.weight' a plain"):
        verify(Tiny, plan, degrees=[2])


def test_positions_from_a_shard():
    plan = bugs.changed(
        MODELS["llama"].plan, embed_tokens=lambda plan, style: plan.vocab_embedding(begins_stream=True)
    )
    _, where = rejected(MODELS["llama"].build, plan)
    assert where == {"model.rotary_emb"}, "what makes the positions, from what the embedding gave"


def test_garbage_after_meta(monkeypatch):
    from fla.models.gla.modeling_gla import GLABlock

    construct = GLABlock.__init__

    def with_decay(self, *args, **kwargs):
        construct(self, *args, **kwargs)
        self.decay = nn.Parameter(torch.empty(4))  # as FLA's mixers do, and never fill it

    monkeypatch.setattr(GLABlock, "__init__", with_decay)
    model = modeling.build(modeling.load_config("gla", "debug"))
    model.to_empty(device="cpu")
    with pytest.raises(modeling.ModelError, match=r"model\.layers\.0\.decay .*left uninitialised"):
        modeling.initialize(model, seed=0)
