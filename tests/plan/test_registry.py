"""Plans are found in `titanplans.plans`, and through the entry points of the group "titanplans.plans"."""

import copy
import sys
from types import SimpleNamespace

import pytest
import titanplans.plans
from titanplans.plans.hf.llama import LlamaPlan

from tests.support.process_groups import run_on_threads
from tests.support.system import install_entry_point
from tests.support.tiny_model import Tiny, TinyPlan
from titanplans import Degrees, PlanError, apply_plan, check_plan, register_plan, registered_plans
from titanplans.cli.listing import listing
from titanplans.plan import registry

PLAN = """
from titanplans import register_plan
from titanplans.plans.hf.llama import LlamaPlan


@register_plan("{name}", mixer="{name}.Attention")
class Plan(LlamaPlan):
    pass
"""


@pytest.fixture
def another(tmp_path, monkeypatch):
    """Reset the registry so that it looks for plans again; return a folder on sys.path for another package."""
    registry._discover()  # a module registers its plans only at its first import, so they are found before the reset
    for table in ("_BY_MODEL_TYPE", "_BY_MIXER"):
        monkeypatch.setattr(registry, table, dict(getattr(registry, table)))
    monkeypatch.syspath_prepend(tmp_path)
    registry._discover.cache_clear()
    yield tmp_path
    registry._discover.cache_clear()
    for name in [name for name in sys.modules if name.endswith(("_elsewhere", "_beside"))]:
        del sys.modules[name]


def write(folder, module, text):
    """Write a package with one module, and the entry point that names it."""
    (folder / f"{module}.py").write_text(text)
    install_entry_point(folder, "titanplans.plans", "mine", module)


def test_a_plan_of_another_package_is_found_by_its_entry_point(another):
    write(another, "plan_elsewhere", PLAN.format(name="elsewhere"))
    assert issubclass(registered_plans()["elsewhere"], LlamaPlan)
    assert "elsewhere.Attention" in registry.registered_mixers()


def test_an_entry_point_that_fails_is_named(another):
    """A package whose plans can't be imported does not affect other plans."""
    write(another, "broken_elsewhere", "import no_such_module\n")
    write(another, "plan_elsewhere", PLAN.format(name="elsewhere"))
    fault = "entry point mine = 'broken_elsewhere' of the group titanplans.plans: ModuleNotFoundError"
    assert {"llama", "elsewhere"} <= registered_plans().keys()
    assert [message.startswith(fault) for message in registry.faulty_plans()] == [True]
    model = Tiny()
    with pytest.raises(PlanError, match="no plan is registered for Tiny") as error:
        registry.plan_for_model(model)
    assert f"Not loaded: {fault}" in str(error.value)
    assert f"not loaded: {fault}" in listing()


@pytest.mark.parametrize("how", ["config", "class attribute", "class name", "empty config"])
def test_a_plan_is_found_by_the_config_s_model_type_or_the_class(another, how):
    """A job finds the plan of `model.class` in the same way."""

    class Own(Tiny):
        pass

    name = "Own" if how in ("class name", "empty config") else f"own_{how.split()[0]}"
    register_plan(name)(type("OwnPlan", (TinyPlan,), {}))
    model = Own()
    model.config = {
        "config": SimpleNamespace(model_type=name),
        "empty config": SimpleNamespace(model_type=""),  # the default of PretrainedConfig
    }.get(how)
    if how == "class attribute":
        del model.config
        Own.model_type = name
    styles = check_plan(model, Degrees(tp=2))
    assert styles.keys() == check_plan(model, Degrees(tp=2), plan=TinyPlan).keys()

    def work(rank):
        split = copy.deepcopy(model)
        return type(apply_plan(split, rank.mesh).plan).__name__

    assert run_on_threads(work) == "OwnPlan"


@pytest.mark.parametrize(
    ("register", "message"),
    [
        (lambda: register_plan("x")(int), r"register_plan\('x'\): <class 'int'> is not a subclass"),
        (lambda: register_plan("x")(lambda: 1), r"register_plan\('x'\): .* is not a subclass"),
        (
            lambda: register_plan(TinyPlan),
            r"register_plan\(<class 'tests.support.tiny_model.TinyPlan'>\): pass the model types",
        ),
        (lambda: register_plan()(TinyPlan), r"register_plan\(\): pass the model types"),
    ],
)
def test_wrong_registrations_are_refused(another, register, message):
    before = registered_plans()
    with pytest.raises(PlanError, match=message):
        register()
    assert registered_plans() == before


def test_a_mesh_of_none_is_refused():
    with pytest.raises(PlanError, match=r"apply_plan .*DeviceMesh, got 'tp'"):
        apply_plan(Tiny(), "tp", plan=TinyPlan)


def test_a_plan_next_to_the_others_is_found(another, monkeypatch):
    (another / "mine_beside.py").write_text(PLAN.format(name="beside"))
    monkeypatch.setattr(titanplans.plans, "__path__", [*titanplans.plans.__path__, str(another)])
    assert registered_plans()["beside"].__module__ == "titanplans.plans.mine_beside"
