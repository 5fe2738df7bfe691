"""A module that two blocks share is split once, and the proof passes."""

import pytest

from tests import zoo
from titanplans import Degrees, PlanError, check_plan, registered_plans, verify

SHARED = [
    ("llama", "self_attn", Degrees(tp=2)),
    ("llama", "self_attn", Degrees(cp=2)),
    ("llama", "self_attn", Degrees(tp=2, pp=2)),
    ("llama", "mlp", Degrees(tp=2)),
    ("llama", "self_attn.q_proj", Degrees(tp=2)),
    ("gla", "attn", Degrees(tp=2)),
    ("mixtral", "mlp.experts", Degrees(tp=2, ep=2)),
    ("mixtral", "mlp", Degrees(tp=2)),
]


def sharing(name, path):
    """Return a model whose second block uses the module at `path` of its first block."""
    model = zoo.build(name)
    first, second = model.model.layers
    parent, _, last = path.rpartition(".")
    setattr(second.get_submodule(parent), last, first.get_submodule(path))
    return model


@pytest.mark.parametrize(("name", "path", "degrees"), SHARED)
def test_a_shared_module_is_split_once(name, path, degrees):
    report = verify(lambda: sharing(name, path), degrees=[degrees], conditions="plain")
    assert report.passed, report.table()


def test_two_styles_of_a_shared_module_are_refused():
    class Differing(registered_plans()["llama"]):
        def layer_plan(self, layer):
            plan = super().layer_plan(layer)
            return plan | {"input_layernorm": self.replicated_off_stream()} if layer.first else plan

    model = sharing("llama", "input_layernorm")
    for at, layer in enumerate(model.model.layers):
        layer.first = at == 0
    with pytest.raises(
        PlanError, match=r"it is also 'model.layers.0.input_layernorm', which has .*: give both keys the same"
    ):
        check_plan(model, Degrees(tp=2), plan=Differing)
