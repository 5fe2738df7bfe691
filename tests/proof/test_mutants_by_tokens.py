"""Wrong plans and a wrong cut, cut by tokens: `verify`, or strict application before it, finds each."""

import pytest
import zoo
from plainly import verify

from titanplans import PlanError, registered_plans
from titanplans.split.collectives import collect
from titanplans.split.tokens.own import OwnTokens


def rejected(name, plan, context=2, **fields):
    """Whether `plan` of the model `name` is refused, or one plain training of it found wrong."""
    try:
        report = verify(
            lambda: zoo.build(name, **fields).double(), plan, degrees=[1], contexts=[context], seq_len=8
        )
    except PlanError:
        return True
    return not report.passed


def changed(name, **styles):
    """Return the plan of `name` with other styles in its mixers: functions of the plan."""
    base = registered_plans()[name]

    class Changed(base):
        def attn_plan(self, attn):
            plan = super().attn_plan(attn)
            return plan | {key: make(self, attn) for key, make in styles.items() if key in plan}

    return Changed


def test_the_plans_themselves_are_right():
    for name in ("olmo2", "mixtral", "rwkv6"):
        assert not rejected(name, registered_plans()[name]), name


def test_a_projection_that_is_not_exchanged():
    assert rejected("llama", changed("llama", q_proj=lambda plan, attn: plan.replicated_in_region()))


def test_a_section_of_other_rows():
    def swapped(plan, attn):
        kv = attn.num_key_value_heads * attn.head_dim
        return plan.packed(kv, kv, attn.config.num_attention_heads * attn.head_dim)

    fields = dict(num_attention_heads=4, num_key_value_heads=2)
    assert rejected("phi3", changed("phi3", qkv_proj=swapped), **fields)


def test_a_norm_whose_statistic_is_not_shared():
    assert rejected("olmo2", changed("olmo2", q_norm=lambda plan, attn: plan.colwise()))


def test_a_balance_that_each_rank_counts_of_its_own_tokens():
    class Own(registered_plans()["mixtral"]):
        balance = None

    assert rejected("mixtral", Own)


def test_a_count_of_all_heads():
    class All(registered_plans()["mamba2"]):
        def local_attributes(self, attn):
            return {}

    assert rejected("mamba2", All)


@pytest.mark.parametrize("wrong", ["own_gradient", "no_tokens"])
def test_a_cut_that_loses_gradients_or_tokens(wrong, monkeypatch):
    if wrong == "own_gradient":  # of what every rank has read, as if only its own tokens had been
        monkeypatch.setattr(OwnTokens, "gather", lambda self, x, length: _collected(self, x, length))
    else:  # the first rank's for all
        monkeypatch.setattr(OwnTokens, "number", lambda self, length: 0)
    assert rejected("rwkv6", registered_plans()["rwkv6"])


def _collected(tokens, x, length):
    return collect(x, tokens.dim, length, tokens.rank, tokens.group)
