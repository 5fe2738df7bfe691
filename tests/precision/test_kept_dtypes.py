"""What a model's class keeps in float32 (`_keep_in_fp32_modules`) is so wherever it goes: built, loaded, split, saved."""

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
"""What the names of a model's tensors end with that stay in float32: of gpt-oss in float16 alone."""
CASES = [(name, torch.float16 if name == "gpt_oss" else torch.bfloat16) for name in KEPT]
ERNIE = dict(
    vocab_size=97, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, moe_intermediate_size=16, moe_num_experts=8, moe_k=2,
)  # fmt: skip


def kept(name, keys):
    return {key for key in keys if key.endswith(KEPT[name])}


def tiny(name):
    return Ernie4_5_MoeConfig(**ERNIE) if name == "ernie4_5_moe" else zoo.config(name)


def real(name, dtype):
    """A model with biases that would route tokens to other experts if they were rounded."""
    model = modeling.build_real(tiny(name), dtype=dtype)
    for key, tensor in model.state_dict().items():
        if key.endswith(BIAS):
            tensor.copy_(0.5 + 1e-3 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1)))
    return model


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}
    for name, _ in CASES:
        made[name] = tmp_path_factory.mktemp(name)
        real(name, torch.float32).save_pretrained(made[name])
    return made


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_a_model_that_is_built_and_loaded_is_that_of_from_pretrained(name, dtype, folders):
    theirs = AutoModelForCausalLM.from_pretrained(folders[name], dtype=dtype).eval()
    model = real(name, dtype).eval()
    load_weights(model, folders[name])
    expected = theirs.state_dict()
    found = model.state_dict()
    assert {key for key, value in found.items() if value.dtype == torch.float32} == kept(name, expected)
    assert kept(name, expected)
    for key, value in expected.items():
        assert value.dtype == found[key].dtype, key
        assert torch.equal(value, found[key]), key
    tokens = torch.randint(0, 97, (2, 16), generator=torch.Generator().manual_seed(2))
    assert torch.equal(model(tokens).logits, theirs(tokens).logits)


def test_the_weaker_word_holds_in_float16_alone():
    dtypes = {value.dtype for value in real("gpt_oss", torch.bfloat16).state_dict().values()}
    assert dtypes == {torch.bfloat16}


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_a_folder_keeps_it(name, dtype, folders, tmp_path):
    model = real(name, torch.float32)
    want = model.state_dict()
    save_weights(model, tmp_path / "out", dtype=dtype)
    written = load_file(tmp_path / "out" / "model.safetensors")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert sum(value.dtype == torch.float32 for value in written.values()) == len(kept(name, want))
    assert theirs.config.dtype == dtype
    found = theirs.state_dict()
    for key in kept(name, want):
        assert torch.equal(found[key], want[key]), key


def test_a_model_that_has_lost_it_is_refused(folders):
    model = real("deepseek_v3", torch.float32).to(torch.bfloat16)
    before = model.lm_head.weight.clone()
    with pytest.raises(
        ModelError,
        match=rf"DeepseekV3ForCausalLM keeps .*{'.*'.join(ROUTER)} in float32, but this model has it in b",
    ):
        load_weights(model, folders["deepseek_v3"])
    assert torch.equal(model.lm_head.weight, before)


def split(rank, name, dtype, folder):
    """On 2 ranks: as FSDP2 or as a plan splits it, each tensor's dtype, and those that modules compute with."""
    found = {}
    cuts = {"fsdp": (torch.float32, Degrees(), {"mixed_precision_param": "bfloat16"})}
    cuts["fsdp, stored so"] = (dtype, Degrees(), {})
    cuts["tp"] = (dtype, Degrees(tp=2), {})
    if dtype == torch.float16:  # none of FSDP2's
        del cuts["fsdp"]
    if name == "ernie4_5_moe":  # has no plan
        del cuts["tp"]
    for cut, (stored, degrees, options) in cuts.items():
        model = real(name, stored).eval()
        config = FSDP2Config(disable_loss_parallel=True, **options)
        manager = ParallelManager(config, degrees, device_type="cpu")
        manager.parallelize(model)
        load_weights(model, folder)
        seen = {}

        def look(path, module, *_, seen=seen):
            tensors = {**module._parameters, **module._buffers}
            seen.update({f"{path}.{key}": value.dtype for key, value in tensors.items() if value is not None})

        for path, module in model.named_modules():
            module.register_forward_pre_hook(functools.partial(look, path))
        tokens = torch.randint(0, 97, (2, 16), generator=torch.Generator().manual_seed(2))
        logits = model(tokens).logits
        logits = logits.full_tensor() if isinstance(logits, DTensor) else logits
        logits.float().square().mean().backward()
        gradients = {key: p.grad.dtype for key, p in model.named_parameters() if p.grad is not None}
        found[cut] = (
            {key: value.dtype for key, value in model.state_dict().items()},
            seen,
            gradients,
            logits.detach(),
        )
    return found


@pytest.mark.parametrize(("name", "dtype"), [case for case in CASES if case[0] != "glm4_moe"])
def test_a_split_model_keeps_it_and_computes_in_it(name, dtype, folders):
    theirs = AutoModelForCausalLM.from_pretrained(folders[name], dtype=dtype).eval()
    tokens = torch.randint(0, 97, (2, 16), generator=torch.Generator().manual_seed(2))
    want = theirs(tokens).logits.detach()
    found = process_groups.run(functools.partial(split, name=name, dtype=dtype, folder=folders[name]), 2)
    for cut, (stored, computed, gradients, logits) in found.items():
        own = kept(name, computed)
        assert own, cut
        assert {computed[key] for key in own} == {torch.float32}, cut
        rest = {key for key in computed if key not in own and "rotary" not in key}
        assert {computed[key] for key in rest} == {dtype}, cut
        assert {stored[key] for key in kept(name, stored)} == {torch.float32}
        assert {gradients[key] for key in kept(name, gradients)} <= {torch.float32}
        if cut != "tp":
            assert torch.equal(logits, want), cut


class Gate(nn.Module):
    """A router with a bias kept in float32 and, if `beside`, a scale that is not."""

    def __init__(self, beside):
        super().__init__()
        self.bias = nn.Parameter(torch.ones(4, device="meta"))
        if beside:
            self.scale = nn.Parameter(torch.ones(4, device="meta"))
        self.proj = nn.Linear(4, 4, device="meta").requires_grad_(False)

    def forward(self, x):
        return self.proj(x) + self.bias


def routed(beside=False):
    model = nn.Module()
    model.embed = nn.Embedding(4, 4, device="meta")
    block = nn.Linear(4, 4, device="meta")
    block.gate = Gate(beside)
    model.layers = nn.ModuleList([block])
    model._get_dtype_plan = lambda dtype: {"gate.bias": torch.float32} if dtype == torch.bfloat16 else {}
    return model


def test_units_of_what_is_kept():
    """Also of a frozen module inside, which is not kept."""
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


def test_float8_leaves_it_out():
    model = nn.ModuleDict({"gate": nn.Linear(16, 16), "proj": nn.Linear(16, 16)})
    model._get_dtype_plan = lambda dtype: {"gate.weight": torch.float32}
    done = convert_to_float8(model, Float8(recipe_name="tensorwise", emulate=True))
    assert done.converted == ("proj",)
    assert done.filtered == {"gate": "the model keeps it in float32"}


def test_one_module_of_both_is_refused():
    model = routed(beside=True)
    with pytest.raises(ParallelError, match=r"0.gate.bias in float32, .*0.gate.scale .*bfloat16"):
        split_dtypes(model, find_units(model), torch.bfloat16)


class Router(nn.Linear):
    _keep_in_fp32_modules_strict = ("router.weight",)


class Own(nn.Module):
    """A user's model: both the model and a module name what stays in float32."""

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
def test_a_model_of_one_s_own_says_what_stays(dtype, expected):
    model = Own()
    keeps = keeps_float32(model, dtype)
    assert {name for name, _ in model.named_parameters() if keeps(name)} == expected
