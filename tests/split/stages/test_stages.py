"""Stages that run one after the other in one process have the logits of the unsplit model, bit for bit, and its gradients.

A parameter that several stages hold, such as a tied embedding, gets the sum of the stages' gradients.
"""

import copy

import pytest

from tests import zoo
from tests.support.stage_comparison import check
from titanplans import find_decoder
from titanplans.errors import ParallelError
from titanplans.kernels import for_meta
from titanplans.split.stages.stage import StandInBlock, StandInModule
from titanplans.split.stages.stages import Stages
from titanplans.split.stages.trace import trace

OWN = {
    "nsa": dict(num_hidden_layers=2),  # its tiny config has one block
}
READS_VALUES = ("moba", "mom", "cat")
"""Families whose code converts tensors to Python numbers, which is impossible on meta."""
NAMES = [name for name in (*zoo.ARCHITECTURES, *zoo.FAMILIES) if name != "tiny"]


def build(name, **fields):
    model = zoo.build(name, **OWN.get(name, {}) | fields).train()
    if hasattr(model.config, "output_router_logits"):
        model.config.output_router_logits = False  # refused below
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the other implementations do not support float64
    return model


def split_into_stages(model, bounds, inputs):
    """Return stages of copies of `model`, traced on the meta device with text alone."""
    decoder, traced, ids = find_decoder(model), copy.deepcopy(model), inputs["input_ids"]
    if model.config.model_type not in READS_VALUES:
        traced, ids = traced.to("meta"), ids.to("meta")
    with for_meta():
        traced_values = trace(traced, decoder, {"input_ids": ids})
    stages = Stages(model, traced_values, bounds[:-1])
    built = [stages.build_stage(copy.deepcopy(model), at) for at in range(len(stages))]
    for stage in built:
        stage.watch()
    return built


@pytest.mark.parametrize("name", NAMES)
def test_two_stages_equal_the_model(name):
    model, inputs = build(name), zoo.inputs(name)
    blocks = len(find_decoder(model).names)
    stages = split_into_stages(model, (0, blocks // 2, blocks), inputs)
    check(model, stages, inputs)


@pytest.mark.parametrize(
    ("name", "takes"),
    [("llama", [0, 1, 1, 1]), ("gla", [0, 1, 1, 1]), ("rwkv7", [0, 2, 2, 2]), ("gpt2", [0, 1, 1, 1])],
)
def test_unequal_stages_have_only_their_own_blocks(name, takes):
    layers = {"gpt2": "n_layer"}.get(name, "num_hidden_layers")
    model, inputs = build(name, **{layers: 6}), zoo.inputs(name)
    stages = split_into_stages(model, (0, 1, 2, 5, 6), inputs)
    check(model, stages, inputs)
    assert [len(stage.takes) for stage in stages] == takes
    for stage, count in zip(stages, (1, 1, 3, 1), strict=True):
        assert len(find_decoder(stage.model).blocks) == count
        assert sum(isinstance(module, StandInBlock) for module in stage.model.modules()) == 6 - count
    first, *inner, last = (stage.model for stage in stages)
    decoder = find_decoder(model)
    assert isinstance(last.get_submodule(decoder.embedding), StandInModule)
    assert isinstance(first.get_submodule(decoder.head), StandInModule)
    for stage in inner:
        names = {name for name, _ in stage.named_parameters()}
        assert all(any(name.startswith(f"{block}.") for block in decoder.names) for name in names), names


def test_a_load_balancing_loss_is_refused():
    model, inputs = build("mixtral"), zoo.inputs("mixtral")
    model.config.output_router_logits = True
    with pytest.raises(ParallelError, match=r"output_router_logits = True: .* set it to False"):
        split_into_stages(model, (0, 1, 2), inputs)
