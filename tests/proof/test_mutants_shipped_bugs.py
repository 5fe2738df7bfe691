"""Bugs that other libraries shipped, reproduced as plans and styles; the table says which test has each.

    a key that matches nothing (NeMo Automodel #2589; transformers #37893)    plan/test_strict.py
    a pattern that hits a module twice (flame #11)                            plan/test_strict.py
    more ranks than key/value heads (torchtitan #932, #2574; DeepSpeed #7259) plan/test_strict.py
    clip_grad_norm_ on Tensor and DTensor (transformers #36296; torchtune     plan/test_strict.py, a foreign style
        #2420): a parameter that is left plain
    rows ordered (n h d), a decay by local head (FLA under naive colwise)     test_mutants_plan_examples.py
    loss scaled by 1/tp, replicas that differ after init (NeMo Automodel      test_wrong_plans.py
        #1291)
    parameters left as garbage after meta (flame #9; FLA #156)                modeling/test_initialize.py

By operators of the corpus, in test_mutants.py:

    q_norm/k_norm gradient not summed (NeMo Automodel #3822, #3857;           as_before_stream
        NeMo-RL #3716; AReaL #335), nor that of a shared projection
        (torchtitan PR #1373), nor the final norm's (Megatron-LM #1446)
    Partial gradient labelled Replicate (torchtitan #3412)                    entry_unsummed
    gradients exactly 2x (pytorch #160285)                                    entry_summed_again
    vocabulary not divisible (Megatron-LM #1754)                              offset_by_local_rows
    positions from a shard's length (transformers)                            begin_elsewhere
    tied weights untied (NeMo-RL #298, #684, #879; torchtitan #2252)          untied
    a keyword that the mixer is not called with (flame #12)                   other_input_name
"""

import pytest
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel

from tests.support.mutants.bugs import changed, counted_on_every_rank
from tests.support.mutants.place import named
from tests.support.plain_proofs import verify_sharded
from tests.support.plan_examples import GateUp, GateUpPlan, with_mlp
from tests.support.tiny_model import Tiny, TinyPlan

pytestmark = pytest.mark.thorough


class Positional(TinyPlan):
    """Attention split by torch's own styles, with its input declared positional."""

    region = PrepareModuleInput(
        input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),), use_local_output=True
    )

    def attn_plan(self, attn):
        split = {name: ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj")}
        out = RowwiseParallel(output_layouts=Shard(1))
        return {"": self.region, **split, "o_proj": out}


class ByKeyword(Positional):
    """The same plan with the input declared as a keyword argument. The block passes its input by keyword."""

    region = PrepareModuleInput(
        input_kwarg_layouts={"hidden_states": Shard(1)},
        desired_input_kwarg_layouts={"hidden_states": Replicate()},
        use_local_output=True,
    )


def without_norm():
    """Return a Tiny whose mixers torch's own styles can split: they have no norm."""
    model = Tiny()
    for layer in model.layers:
        layer.attn.q_norm = nn.Identity()
    return model


BUGS = {
    "replicas counted tp times in the norm (TransformerEngine ROCm #715; NeMo-RL #3788)": (
        Tiny, changed(TinyPlan, norm=lambda plan, style: counted_on_every_rank(style)), False,
        "norm", {"gradients", "norm"},
    ),
    "packed projection split evenly (Megatron-LM #1989; Baichuan)": (
        lambda: with_mlp(GateUp),
        changed(GateUpPlan, gate_up_proj=lambda plan, style: plan.colwise(interleaved=True)), True,
        "layers.0.mlp.down_proj", {"loss"},  # each rank's tokens are right; the gathered sequence is not
    ),
    "positional layouts for keyword inputs (flame #12)": (without_norm, Positional, True, "layers.0.attn", {"runs"}),
}  # fmt: skip
"""Model, plan, sequence_parallel, the module that the report names, and some of the checks that fail."""


@pytest.mark.parametrize("name", BUGS)
def test_a_shipped_bug_is_rejected_with_its_module(name):
    build, plan, sequence, module, fails = BUGS[name]
    report = verify_sharded(build, plan, sequence_parallel=sequence, seq_len=8)
    (case,) = report.cases
    assert not report.passed
    assert named(case, build()) == {module}
    assert {check.what for check in case.checks if not check.passed} >= fails
    if fails == {"runs"}:
        assert case.worst == f"runs in {module}", "and not after the module before it"


def test_a_keyword_input_declared_by_its_name_is_proved():
    assert verify_sharded(without_norm, ByKeyword).passed
