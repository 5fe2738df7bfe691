"""Parameters that a model's class keeps in float32 (`_keep_in_fp32_modules`) stay so when built, loaded, split or saved."""

import functools

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, Ernie4_5_MoeConfig

from tests import zoo
from tests.support import process_groups
from titanplans import load_weights, modeling
from titanplans.config import Float8
from titanplans.errors import ModelError
from titanplans.parallel import Degrees, FSDP2Config, ParallelError, ParallelManager
from titanplans.parallel.fsdp.dtypes import split_dtypes
from titanplans.parallel.fsdp.units import FSDPUnit, find_units, managed
from titanplans.precision.float8.conversion import convert_to_float8
from titanplans.precision.kept_dtypes import keeps_float32
from titanplans.weights.save import save_weights

BIAS = "e_score_correction_bias"
ROUTER = tuple(sorted(f"mlp.{name}" for name in zoo.float32_of_routers()))
KEPT = {
    "deepseek_v3": ROUTER,
    "glm4_moe": ROUTER,
    "ernie4_5_moe": ("mlp.gate.weight", "mlp.gate.moe_statics." + BIAS),
    "gpt_oss": ("layernorm.weight", "model.norm.weight"),
}
"""By model, suffixes of the names of tensors that stay in float32 (in gpt-oss only if the model is in float16)."""
CASES = [(name, torch.float16 if name == "gpt_oss" else torch.bfloat16) for name in KEPT]
ERNIE = dict(
    vocab_size=97, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, moe_intermediate_size=16, moe_num_experts=8, moe_k=2,
)  # fmt: skip


def names_in_float32(name, keys):
    return {key for key in keys if key.endswith(KEPT[name])}


def tiny(name):
    return Ernie4_5_MoeConfig(**ERNIE) if name == "ernie4_5_moe" else zoo.config(name)


def real(name, dtype):
    """Return a model with router biases that would select other experts if they were rounded."""
    model = modeling.build_real(tiny(name), dtype=dtype)
    for key, tensor in model.state_dict().items():
        if key.endswith(BIAS):
            tensor.copy_(0.5 + 1e-3 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1)))
    return model


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    paths = {}
    for name, _ in CASES:
        paths[name] = tmp_path_factory.mktemp(name)
        real(name, torch.float32).save_pretrained(paths[name])
    return paths


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_a_model_built_and_loaded_equals_that_of_from_pretrained(name, dtype, folders):
    theirs = AutoModelForCausalLM.from_pretrained(folders[name], dtype=dtype).eval()
    model = real(name, dtype).eval()
    load_weights(model, folders[name])
    expected = theirs.state_dict()
    state = model.state_dict()
    assert {key for key, value in state.items() if value.dtype == torch.float32} == names_in_float32(
        name, expected
    )
    assert names_in_float32(name, expected)
    for key, value in expected.items():
        assert value.dtype == state[key].dtype, key
        assert torch.equal(value, state[key]), key
    tokens = torch.randint(0, 97, (2, 16), generator=torch.Generator().manual_seed(2))
    assert torch.equal(model(tokens).logits, theirs(tokens).logits)


def test_the_non_strict_attribute_applies_only_in_float16():
    dtypes = {value.dtype for value in real("gpt_oss", torch.bfloat16).state_dict().values()}
    assert dtypes == {torch.bfloat16}


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_a_saved_folder_keeps_float32(name, dtype, folders, tmp_path):
    model = real(name, torch.float32)
    want = model.state_dict()
    save_weights(model, tmp_path / "out", dtype=dtype)
    written = load_file(tmp_path / "out" / "model.safetensors")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert sum(value.dtype == torch.float32 for value in written.values()) == len(
        names_in_float32(name, want)
    )
    assert theirs.config.dtype == dtype
    loaded = theirs.state_dict()
    for key in names_in_float32(name, want):
        assert torch.equal(loaded[key], want[key]), key


def test_a_model_that_was_rounded_is_refused(folders):
    model = real("deepseek_v3", torch.float32).to(torch.bfloat16)
    before = model.lm_head.weight.clone()
    with pytest.raises(
        ModelError,
        match=rf"DeepseekV3ForCausalLM keeps .*{'.*'.join(ROUTER)} in float32, but this model has it in b",
    ):
        load_weights(model, folders["deepseek_v3"])
    assert torch.equal(model.lm_head.weight, before)


def split(rank, name, dtype, folder):
    """Return the dtypes of stored tensors, and the dtypes in which modules compute, for FSDP2 and tensor parallelism."""
    results = {}
    ways = {"fsdp": (torch.float32, Degrees(), {"mixed_precision_param": "bfloat16"})}
    ways["fsdp, stored so"] = (dtype, Degrees(), {})
    ways["tp"] = (dtype, Degrees(tp=2), {})
    if dtype == torch.float16:  # FSDP2's options do not accept float16
        del ways["fsdp"]
    if name == "ernie4_5_moe":  # this family has no plan
        del ways["tp"]
    for way, (stored, degrees, options) in ways.items():
        model = real(name, stored).eval()
        config = FSDP2Config(disable_loss_parallel=True, **options)
        manager = ParallelManager(config, degrees, device_type="cpu")
        manager.parallelize(model)
        load_weights(model, folder)
        computed = {}

        def look(path, module, *_, computed=computed):
            tensors = {**module._parameters, **module._buffers}
            computed.update(
                {f"{path}.{key}": value.dtype for key, value in tensors.items() if value is not None}
            )

        for path, module in model.named_modules():
            module.register_forward_pre_hook(functools.partial(look, path))
        tokens = torch.randint(0, 97, (2, 16), generator=torch.Generator().manual_seed(2))
        logits = model(tokens).logits
        logits = logits.full_tensor() if isinstance(logits, DTensor) else logits
        logits.float().square().mean().backward()
        gradients = {key: p.grad.dtype for key, p in model.named_parameters() if p.grad is not None}
        results[way] = (
            {key: value.dtype for key, value in model.state_dict().items()},
            computed,
            gradients,
            logits.detach(),
        )
    return results


@pytest.mark.parametrize(("name", "dtype"), [case for case in CASES if case[0] != "glm4_moe"])
def test_a_split_model_keeps_float32_and_computes_in_it(name, dtype, folders):
    theirs = AutoModelForCausalLM.from_pretrained(folders[name], dtype=dtype).eval()
    tokens = torch.randint(0, 97, (2, 16), generator=torch.Generator().manual_seed(2))
    want = theirs(tokens).logits.detach()
    results = process_groups.run(functools.partial(split, name=name, dtype=dtype, folder=folders[name]), 2)
    for way, (stored, computed, gradients, logits) in results.items():
        in_float32 = names_in_float32(name, computed)
        assert in_float32, way
        assert {computed[key] for key in in_float32} == {torch.float32}, way
        others = {key for key in computed if key not in in_float32 and "rotary" not in key}
        assert {computed[key] for key in others} == {dtype}, way
        assert {stored[key] for key in names_in_float32(name, stored)} == {torch.float32}
        assert {gradients[key] for key in names_in_float32(name, gradients)} <= {torch.float32}
        if way != "tp":
            assert torch.equal(logits, want), way


class Gate(nn.Module):
    """A router with a bias that is kept in float32. With `scaled` it also has a scale that is not kept."""

    def __init__(self, scaled):
        super().__init__()
        self.bias = nn.Parameter(torch.ones(4, device="meta"))
        if scaled:
            self.scale = nn.Parameter(torch.ones(4, device="meta"))
        self.proj = nn.Linear(4, 4, device="meta").requires_grad_(False)

    def forward(self, x):
        return self.proj(x) + self.bias


def routed(scaled=False):
    model = nn.Module()
    model.embed = nn.Embedding(4, 4, device="meta")
    block = nn.Linear(4, 4, device="meta")
    block.gate = Gate(scaled)
    model.layers = nn.ModuleList([block])
    model._get_dtype_plan = lambda dtype: {"gate.bias": torch.float32} if dtype == torch.bfloat16 else {}
    return model


def test_fsdp_modules_of_parameters_in_float32():
    """The frozen module inside of the router is not kept in float32, and becomes an FSDP module, too."""
    model = routed()
    units = split_dtypes(model, find_units(model), torch.bfloat16)
    (block,) = [unit for unit in units if unit.role == "block"]
    assert block.inner == (
        FSDPUnit(("layers.0.gate.proj",), "dtype"),
        FSDPUnit(("layers.0.gate",), "dtype", kept=True),
    )
    assert [*managed(model, block.inner[1], units)] == ["layers.0.gate.bias"]
    for dtype in (None, torch.float16):
        assert not any(unit.kept or unit.inner for unit in split_dtypes(model, find_units(model), dtype))


def test_float8_does_not_convert_modules_in_float32():
    model = nn.ModuleDict({"gate": nn.Linear(16, 16), "proj": nn.Linear(16, 16)})
    model._get_dtype_plan = lambda dtype: {"gate.weight": torch.float32}
    done = convert_to_float8(model, Float8(recipe_name="tensorwise", emulate=True))
    assert done.converted == ("proj",)
    assert done.filtered == {"gate": "the model keeps it in float32"}


def test_a_module_with_both_dtypes_is_refused():
    model = routed(scaled=True)
    with pytest.raises(ParallelError, match=r"0.gate.bias in float32, .*0.gate.scale .*bfloat16"):
        split_dtypes(model, find_units(model), torch.bfloat16)


class Router(nn.Linear):
    _keep_in_fp32_modules_strict = ("router.weight",)


class Declaring(nn.Module):
    """A user's model. Both the model and one of its modules declare what stays in float32."""

    _keep_in_fp32_modules = ("norm",)

    def __init__(self):
        super().__init__()
        self.router, self.norm, self.out = Router(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.bfloat16, {"router.weight"}),
        (torch.float16, {"router.weight", "norm.weight", "norm.bias"}),
        (torch.float32, set()),
    ],
)
def test_a_model_of_the_user_declares_what_stays_in_float32(dtype, expected):
    model = Declaring()
    keeps = keeps_float32(model, dtype)
    assert {name for name, _ in model.named_parameters() if keeps(name)} == expected
