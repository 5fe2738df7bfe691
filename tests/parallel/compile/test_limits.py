"""Compiling without effect is refused, compiling too often is an error, and a block with FLA's kernels has few graphs."""

import copy

import pytest
import torch
from torch._dynamo.utils import counters

from tests.support.releases import needs_torch_2_13
from tests.support.tiny_model import Tiny
from titanplans.config.compatibility.strategy import StrategyOnMesh, check_on_mesh
from titanplans.parallel import Compile, Degrees, FSDP2Config, Mesh, ParallelError, parallelize
from titanplans.parallel.compile import apply_compile, compile_loss, compile_options, components
from titanplans.parallel.compile.graph_breaks import end_graphs_at_kernels
from titanplans.parallel.compile.limits import count_kinds
from titanplans.proof.ranks.fake import fake_ranks
from titanplans.text import class_name


def config(backend="aot_eager", **options):
    return Compile(enable=True, backend=backend, **options)


def build(name, **sizes):
    from titanplans import kernels, modeling

    kernels.install("cpu")
    return modeling.build_real(modeling.load_config(name, "debug", **sizes), dtype=torch.float32)


def test_compile_disabled_by_the_environment_is_refused(monkeypatch):
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    with pytest.raises(ParallelError, match="TORCHDYNAMO_DISABLE=1 in the environment"):
        compile_options(Compile(enable=True))


@pytest.mark.parametrize(
    ("setting", "variable"),
    [("disable", "TORCH_COMPILE_DISABLE"), ("suppress_errors", "TORCHDYNAMO_SUPPRESS_ERRORS")],
)
def test_compile_disabled_by_a_setting_is_refused(setting, variable):
    with torch._dynamo.config.patch({setting: True}):
        for ask in (
            lambda: compile_options(Compile(enable=True)),
            lambda: apply_compile(Tiny(), config(), None),
            lambda: compile_loss(torch.nn.MSELoss(), config()),
        ):
            with pytest.raises(ParallelError, match=variable):
                ask()


def inductor(**options):
    return Compile(enable=True, **options)


NOT_FOR = {
    'compile.mode = "reduce-overhead"': (inductor(mode="reduce-overhead"), "cpu"),
    'compile.mode = "max-autotune"': (inductor(mode="max-autotune"), "cpu"),
    'compile.backend = "cudagraphs"': (Compile(enable=True, backend="cudagraphs"), "cpu"),
    "'triton.cudagraphs'": (inductor(options={"epilogue_fusion": True, "triton.cudagraphs": True}), "cpu"),
    "'cpp.simdlen'": (inductor(options={"cpp.simdlen": 1}), "cuda"),
}


@pytest.mark.parametrize("message", NOT_FOR)
def test_options_without_effect_on_this_device_are_refused(message):
    options, device = NOT_FOR[message]
    with pytest.raises(ParallelError, match=message):
        check_on_mesh(on_mesh(options, device))
    if 'cudagraphs"' not in message or device == "cuda":
        check_on_mesh(on_mesh(options, {"cpu": "cuda", "cuda": "cpu"}[device]))


def on_mesh(options, device):
    config = FSDP2Config(compile=options)
    return StrategyOnMesh(
        config, tp=1, cp=1, ep=1, dp_replicate=1, dp_shard=1, device_type=device, nccl=False, one_graph=True
    )


def test_refused_before_any_weight_moves():
    strategy = FSDP2Config(compile=Compile(enable=True, mode="max-autotune", components=("loss",)))
    with fake_ranks(2), pytest.raises(ParallelError, match='"max-autotune": has no effect on a CPU'):
        parallelize(Tiny(), parallel_dims=Mesh(Degrees(), "cpu"), config=strategy)


def test_a_value_of_another_type_is_refused():
    with pytest.raises(ParallelError, match="epilogue_fusion, got str should be bool"):
        compile_options(Compile(enable=True, options={"epilogue_fusion": "yes"}))


@pytest.fixture
def low_limit(monkeypatch):
    """Set a recompile limit that is reached sooner than torch's default; return it."""
    monkeypatch.setattr(components, "RECOMPILATIONS", 3)
    return 3


@pytest.mark.parametrize("fullgraph", [True, False])
def test_compiling_too_often_is_an_error(fullgraph, low_limit):
    model = Tiny()
    apply_compile(model, config(dynamic=False, fullgraph=fullgraph), None)
    tokens = torch.zeros(1, 16, dtype=torch.long)
    for length in range(1, 1 + low_limit):
        model(tokens[:, :length])
    assert counters["stats"]["unique_graphs"] == low_limit
    with pytest.raises(ParallelError, match=r"layers.0 was compiled 3 times") as error:
        model(tokens[:, : 1 + low_limit])
    assert "\n" not in str(error.value)
    model(tokens[:, :low_limit])  # existing graphs still run


def test_compiling_a_loss_too_often_is_an_error(low_limit):
    loss = compile_loss(lambda x: x.square().mean(), config(dynamic=False))
    for length in range(1, 1 + low_limit):
        loss(torch.ones(length))
    with pytest.raises(ParallelError, match="something in the loss was compiled 3 times"):
        loss(torch.ones(1 + low_limit))


def test_the_kinds_of_blocks_are_counted():
    assert count_kinds(Tiny().layers) == 1
    gemma = build("gemma3_text", num_hidden_layers=4)
    assert {layer.self_attn.is_sliding for layer in gemma.model.layers} == {True, False}
    assert count_kinds(gemma.model.layers) == 2


def test_only_the_module_around_a_kernel_is_outside_of_graphs():
    model = build("gla", num_hidden_layers=1)
    block = model.model.layers[0]
    names, keys = [type(module).__name__ for module in block.modules()], list(model.state_dict())
    before = {name: type(module) for name, module in block.named_modules()}
    end_graphs_at_kernels(block)
    out = [name for name, module in block.named_modules() if type(module) is not before[name]]
    assert out == ["attn_norm", "attn.g_norm_swish_gate", "mlp_norm", "mlp.swiglu_linear"]
    assert [class_name(module) for module in block.modules()] == names
    assert list(model.state_dict()) == keys
    twin = copy.deepcopy(block.attn_norm)
    with torch.no_grad():
        twin.weight.zero_()
    x = torch.randn(2, 3, block.attn_norm.weight.shape[0])
    assert twin(x).abs().max() == 0 < block.attn_norm(x).abs().max()


@needs_torch_2_13("older compilers begin a graph at each module")
def test_between_two_kernels_is_one_graph_across_modules():
    model = build("gla", num_hidden_layers=2)
    expected = model(torch.arange(32).reshape(2, 16), use_cache=False).logits
    apply_compile(model, config(), None)
    logits = model(torch.arange(32).reshape(2, 16), use_cache=False).logits
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)  # float32, a few layers
    # attn_norm | projections | recurrence | gated norm | output | mlp_norm | gate and up | swiglu | sum.
    assert counters["stats"]["unique_graphs"] == 5
    # The output projection and the MLP's norm are in different modules, as are gate, up and the border of the MLP.
    # torch counts the break at the recurrence twice: once when it traces into the function, once when it calls the
    # function.
    assert sum(counters["graph_break"].values()) == 6
