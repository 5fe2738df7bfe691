"""The plan of each architecture of `zoo.FURTHER`, derived again without reading it, and compared style by style."""

import re

import pytest

from tests import zoo
from tests.derive.test_search import derived, styles
from titanplans import registered_plans
from titanplans.plan.degrees import Degrees

pytestmark = [pytest.mark.usefixtures("cpu_kernels"), pytest.mark.exhaustive]

OTHERWISE = {
    "codegen": "the rows of qkv_proj are not marked as interleaved",
    "hy_v4": "a key for each parameter of attn_hc and ffn_hc",
    "kimi_linear": "one key for the parameters of forget_gate",
    "mimo_v2_flash": "the key/value heads of blocks with a window are not counted",
}
"""Types for which a plan is derived and proved that differs from the registered one, and how."""


def comparable(plan, model):
    """Return the styles of a plan, without the names of the functions that norms of gated inputs get."""
    return {
        key: re.sub(r"<function \w+ at \w+>", "function", style)
        for key, style in styles(plan, model, 2).items()
    }


@pytest.mark.parametrize("name", zoo.FURTHER)
def test_the_registered_plan_is_derived_again(name):
    plan, make = derived(name, degrees=[2, Degrees(cp=2, dp_shard=1)], conditions="plain")
    assert plan.is_proved, plan.notes
    model = make()
    is_equal = comparable(registered_plans()[name], model) == comparable(plan.plan, model)
    assert is_equal == (name not in OTHERWISE)
