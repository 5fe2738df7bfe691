"""Bugs that were shipped, made again as plans and styles: `verify`, or strict application before it, rejects each.

A row of BUGS or REFUSED names what was shipped, and by whom. What other tests hold:

    a key that matches nothing (NeMo Automodel #2589; transformers #37893)    plan/test_strict.py
    a pattern that hits a module twice (flame #11)                            plan/test_strict.py
    more ranks than key/value heads (torchtitan #932, #2574; DeepSpeed #7259) plan/test_strict.py
    clip_grad_norm_ on Tensor and DTensor (transformers #36296; torchtune     plan/test_strict.py, a foreign style
        #2420): a parameter that is left plain
    rows ordered (n h d), a decay by local head (FLA under naive colwise)     test_language_mutants.py
    loss scaled by 1/tp, replicas that differ after init (NeMo Automodel      test_proof_wrong.py
        #1291)
    parameters left as garbage after meta (flame #9; FLA #156)                modeling/test_initialize.py
"""

from functools import partial
from typing import Any, NamedTuple

import pytest
from language import GateUp, GateUpPlan, with_mlp
from mutants import bugs, faults
from mutants.architectures import ARCHITECTURES
from mutants.place import named
from plainly import verify
from tiny import Tiny, TinyPlan, changed
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel

from titanplans import PlanError

MODELS = {architecture.name: architecture for architecture in ARCHITECTURES}
UNSUMMED = "each rank has its own share: not summed over the ranks"


class Bug(NamedTuple):
    build: Any
    plan: type
    place: str
    """The module that the report names."""
    reason: str = ""
    fails: tuple[str, ...] = ()
    """Checks that fail, among others."""
    silent: bool = False
    """Loss and logits are right, so that nobody would see it in a loss curve."""
    sequence_parallel: bool = True


class Positional(TinyPlan):
    """Attention by torch's own styles, which look for its input at a position."""

    region = PrepareModuleInput(
        input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),), use_local_output=True
    )

    def attn_plan(self, attn):
        split = {name: ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj")}
        out = RowwiseParallel(output_layouts=Shard(1))
        return {"": self.region, **split, "o_proj": out}


class ByKeyword(Positional):
    """And this one by its name, which is how the block hands it over."""

    region = PrepareModuleInput(
        input_kwarg_layouts={"hidden_states": Shard(1)},
        desired_input_kwarg_layouts={"hidden_states": Replicate()},
        use_local_output=True,
    )


def without_norm():
    """A Tiny whose mixers have no parameter that torch has no style for."""
    model = Tiny()
    for layer in model.layers:
        layer.attn.q_norm = nn.Identity()
    return model


def off_stream(plan, style):
    return plan.replicated_off_stream()


def of(
    name: str, place: str, reason: str = "", fails: tuple[str, ...] = (), silent: bool = False, **changes: Any
):
    """Return the bug of a registered plan, in the model of the corpus."""
    return Bug(MODELS[name].build, bugs.changed(MODELS[name].plan, **changes), place, reason, fails, silent)


def of_tiny(place: str, *more: Any, sequence_parallel: bool = True, **changes: Any):
    return Bug(Tiny, bugs.changed(TinyPlan, **changes), place, *more, sequence_parallel=sequence_parallel)


HEAD_NORMS = {"q_norm": off_stream, "k_norm": off_stream}
BUGS = {
    "q_norm/k_norm gradient not summed (NeMo Automodel #3822, #3857; NeMo-RL #3716; AReaL #335)": of(
        "qwen3", "model.layers.1.self_attn.k_norm", UNSUMMED, silent=True, **HEAD_NORMS
    ),
    "the same in Gemma 3": of(
        "gemma3_text", "model.layers.1.self_attn.k_norm", UNSUMMED, silent=True, **HEAD_NORMS
    ),
    "Partial gradient labelled Replicate (torchtitan #3412)": of_tiny(
        "norm", UNSUMMED, sequence_parallel=False, lm_head=lambda plan, style: faults.entry_unsummed(style)
    ),
    "gradient of a shared projection not summed (torchtitan PR #1373)": of(
        "gla", "model.layers.1.attn.gk_proj.0", UNSUMMED, **{"0": off_stream}
    ),
    "final norm's gradient differs by rank (Megatron-LM #1446)": of_tiny(
        "norm", "", ("replicas",), norm=off_stream
    ),
    "vocabulary not divisible (Megatron-LM #1754)": of(
        "qwen3", "model.embed_tokens", "", ("loss",),
        embed_tokens=lambda plan, style: faults.offset_by_local_rows(style),
    ),
    "replicas counted tp times in the norm (TransformerEngine ROCm #715; NeMo-RL #3788)": of_tiny(
        "norm", "", ("gradients", "norm"), sequence_parallel=False,
        norm=lambda plan, style: bugs.counted_on_every_rank(style),
    ),
    "gradients exactly 2x (pytorch #160285)": of_tiny(
        "norm", "exactly 2 times too large: once for each rank", (), True,
        lm_head=lambda plan, style: faults.entry_summed_again(style),
    ),
    "packed projection split evenly (Megatron-LM #1989; Baichuan)": Bug(
        partial(with_mlp, GateUp),
        bugs.changed(GateUpPlan, gate_up_proj=lambda plan, style: plan.colwise(interleaved=True)),
        "layers.0.mlp.down_proj", "", ("loss",),  # each rank's rows are right, and show where they have met
    ),
    "positional layouts for keyword inputs (flame #12)": Bug(without_norm, Positional, "layers.0.attn", "", ("runs",)),
    "positions from a shard's length (transformers)": of(
        "llama", "model.rotary_emb", embed_tokens=lambda plan, style: plan.vocab_embedding(begins_stream=True)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BUGS)
def test_it_is_found_and_placed(name):
    bug = BUGS[name]
    options = {"loss_parallel": True, "sequence_parallel": bug.sequence_parallel, "seq_len": 8}
    report = verify(bug.build, bug.plan, degrees=[2], **options)
    (case,) = report.cases
    assert not report.passed
    assert named(case, bug.build()) == {bug.place}
    assert not bug.reason or case.finding.reason == bug.reason
    failed = {check.what for check in case.checks if not check.passed}
    assert failed >= set(bug.fails)
    assert not bug.silent or not failed & {"loss", "logits"}
    if bug.fails == ("runs",):
        assert case.worst == f"runs in {bug.place}", "not after its neighbour"


HIT_TWICE = changed(TinyPlan, model=lambda plan: {"layers.0.attn.o_proj": plan.rowwise()})


def untied(plan, style):
    return faults.untied(style)


REFUSED = {
    "a prefix that hits a module twice (flame #11)": (Tiny, HIT_TWICE, r"'layers\.0\.attn\.o_proj' is given by"),
    "tied weights untied (NeMo-RL #298, #684, #879; torchtitan #2252)": (
        partial(Tiny, tied=True), bugs.changed(TinyPlan, embed=untied), r"embed\.weight and lm_head\.weight were tied",
    ),
    "the same at the head": (
        partial(Tiny, tied=True), bugs.changed(TinyPlan, lm_head=untied), r"embed\.weight and lm_head\.weight were tied",
    ),
    "a keyword that the mixer is not called with (flame #12)": (
        Tiny, bugs.changed(TinyPlan, attn=lambda plan, style: plan.attn_input("x")[""]),
        r"'layers\.0\.attn' \(Region on Attention\): .*'x' \(got hidden_states\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused(name):
    build, plan, words = REFUSED[name]
    with pytest.raises(PlanError, match=words):
        verify(build, plan, degrees=[2])


def test_keyword_inputs_by_their_names_are_right():
    assert verify(without_norm, ByKeyword, degrees=[2], loss_parallel=True, sequence_parallel=True).passed
