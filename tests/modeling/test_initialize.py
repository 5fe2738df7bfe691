"""Initial weights in one process: their values, how these depend on seed and dtype, and errors."""

import math

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import AutoModelForCausalLM, FalconH1Config, LlamaConfig

from tests import zoo
from titanplans import modeling
from titanplans.modeling import ModelError

LLAMA = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=128, intermediate_size=96)


pytestmark = pytest.mark.usefixtures("cpu_kernels")


def _initialized(config, seed=0, dtype=torch.float32):
    torch.set_default_dtype(dtype)
    try:
        model = modeling.build(config)
    finally:
        torch.set_default_dtype(torch.float32)
    _spoil(model)
    modeling.initialize(model, seed=seed)
    return model


def _spoil(model):
    """Fill a model with the worst values that `to_empty` may leave."""
    model.to_empty(device="cpu")
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.data.fill_(math.nan if tensor.is_floating_point() else 77)


def _assert_as_constructed(model):
    """Check against the model that its constructor initialises: distributions of parameters, and values of buffers."""
    torch.manual_seed(0)
    ordinary = AutoModelForCausalLM.from_config(model.config)
    ordinary_parameters = dict(ordinary.named_parameters())
    assert ordinary_parameters.keys() == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        value, expected = parameter.detach().float(), ordinary_parameters[name].detach().float()
        assert value.isfinite().all(), name
        # Both are samples of n values. The standard error of the mean is 1/sqrt(n) standard deviations, and the standard
        # error of the deviation is 1/sqrt(2n). With five standard errors for each sample, one test in a million fails by
        # chance. A parameter with few values (the decays of four heads) only shows whether it is random.
        n, deviation = value.numel(), expected.std(correction=0)
        if n < 64 and deviation > 0:
            assert value.std(correction=0) > 0, name
            continue
        assert abs(value.mean() - expected.mean()) <= 10 * deviation / n**0.5, name
        assert abs(value.std(correction=0) - deviation) <= 10 * deviation / (2 * n) ** 0.5, name
    for (name, buffer), (_, expected) in zip(model.named_buffers(), ordinary.named_buffers(), strict=True):
        assert torch.equal(buffer, expected), name


TIED, RANGE = {"tie_word_embeddings": True}, {"initializer_range": 0.006}
OPTIONS = {
    "gla": [
        {},
        {"use_short_conv": True, "fuse_norm": False},
        {"use_output_gate": False} | TIED | RANGE,
        {"attn": {"layers": [1], "num_heads": 4, "qkv_bias": True}, "attnres_block_size": 2},
    ],
    "transformer": [{}, {"qk_norm": True, "qkv_bias": True} | TIED],
} | {name: [{}, TIED, RANGE] for name in ("llama", "mistral", "qwen2", "qwen3", "gemma3_text", "gemma3")}


@pytest.mark.parametrize(("name", "options"), [(name, each) for name in OPTIONS for each in OPTIONS[name]])
def test_initial_weights_are_those_of_the_models_code(name, options):
    _assert_as_constructed(_initialized(modeling.load_config(name, "debug", **options)))


@pytest.mark.parametrize("name", zoo.FURTHER)
def test_initial_weights_of_further_architectures_are_those_of_their_code(name):
    _assert_as_constructed(_initialized(zoo.config(name)))


@pytest.mark.parametrize(
    "name",
    # Families whose `_init_weights` misses parameters (comba, hgrn, mesa_net, rwkv, mom, samba), one whose mixer keeps its
    # values only because its constructor marks them, and two that initialise everything.
    [
        "Comba",
        "HGRN",
        "HGRN2",
        "MesaNet",
        "Mom",
        "RWKV6",
        "RWKV7",
        "Samba",
        "PrecondKDA",
        "GatedDeltaNet",
        "Mamba2",
    ],
)
def test_values_set_only_by_a_constructor_are_kept(name):
    import fla.models

    options = {"hidden_size": 128, "num_hidden_layers": 2, "vocab_size": 128}
    if name == "Samba":
        options["attn"] = {"layers": [1], "num_heads": 4}
    elif name == "Mamba2":
        options |= {"num_heads": 4, "head_dim": 64}
    elif name == "RWKV7":
        options["head_dim"] = 32
    else:
        options["num_heads"] = 4
    _assert_as_constructed(_initialized(getattr(fla.models, f"{name}Config")(**options)))


def test_norms_and_padding_of_gemma():
    model = _initialized(modeling.load_config("gemma3", "debug"))
    text, tower = model.model.language_model, model.model.vision_tower
    norms = [module for module in text.modules() if type(module).__name__ == "Gemma3RMSNorm"]
    assert len(norms) == 4 * 6 + 1
    assert not any(norm.weight.any() for norm in norms), "the norms multiply by 1 + weight"
    assert not text.embed_tokens.weight[0].any(), "the padding token"
    assert text.embed_tokens.embed_scale == torch.tensor(128**0.5)
    for kind, base in (("sliding_attention", 1e4), ("full_attention", 1e6)):
        expected = base ** (-torch.arange(0, 32, 2).float() / 32)
        torch.testing.assert_close(text.rotary_emb.get_buffer(f"{kind}_inv_freq"), expected)
    assert torch.equal(tower.embeddings.position_ids, torch.arange(16)[None])
    assert model.lm_head.weight is text.embed_tokens.weight


def test_rotary_scaling_of_llama_is_in_its_buffer():
    inv_freq = _initialized(modeling.load_config("llama", "debug")).model.rotary_emb.inv_freq
    plain = 500000.0 ** (-torch.arange(0, 16, 2).float() / 16)
    # Llama 3.2: wavelengths up to 8192 / 4 are unchanged; wavelengths from 8192 / 1 on become 32 times as long.
    wavelength = 2 * math.pi / plain
    torch.testing.assert_close(inv_freq[wavelength < 2048], plain[wavelength < 2048])
    torch.testing.assert_close(inv_freq[wavelength > 8192], plain[wavelength > 8192] / 32)
    assert 0 < (wavelength > 8192).sum() < 8


def test_same_seed_same_weights_other_seed_other_weights():
    config = modeling.load_config("gla", "debug")
    first, again, of_other_seed = (dict(_initialized(config, seed).named_parameters()) for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    random = [name for name in first if first[name].std(correction=0) > 0]
    assert len(random) == 4 * 10 + 2  # the projections, the embedding and the head
    assert not any(torch.equal(first[name], of_other_seed[name]) for name in random)


def test_layers_have_different_weights():
    layers = _initialized(modeling.load_config("gla", "debug")).model.layers
    weights = [
        module.weight.flatten()[:100]
        for layer in layers
        for module in layer.modules()
        if type(module) is nn.Linear
    ]
    assert len({tuple(weight.tolist()) for weight in weights}) == len(weights)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_every_dtype_has_the_same_initial_weights(dtype):
    config = modeling.load_config("transformer", "debug")
    reference = dict(_initialized(config).named_parameters())
    for name, parameter in _initialized(config, dtype=dtype).named_parameters():
        assert parameter.dtype == dtype
        assert torch.equal(parameter, reference[name].to(dtype)), name


def test_tied_weights_are_one_parameter():
    model = _initialized(modeling.load_config("gla", "debug", tie_word_embeddings=True))
    assert model.lm_head.weight is model.model.embeddings.weight
    assert len(list(model.parameters())) == len({id(p) for p in model.parameters()})


def test_the_random_state_and_modes_of_the_caller_are_unchanged():
    torch.manual_seed(7)
    state = torch.get_rng_state()
    constructors = [
        cls.__init__ for cls in (nn.Linear, type(_initialized(LlamaConfig(**LLAMA)).model.layers[0]))
    ]
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.get_default_dtype() == torch.float32
    model = _initialized(LlamaConfig(**LLAMA))
    assert constructors == [cls.__init__ for cls in (nn.Linear, type(model.model.layers[0]))]
    assert all("_is_hf_initialized" not in vars(module) for module in model.modules())


def test_wrapped_layers_are_initialized_by_their_names():
    config = modeling.load_config("gla", "debug")
    model = modeling.build(config)
    for index, layer in enumerate(model.model.layers):
        model.model.layers[index] = checkpoint_wrapper(layer)
    model.model.layers[0] = torch.compile(model.model.layers[0])
    _spoil(model)
    modeling.initialize(model, seed=0)
    expected = list(_initialized(config).parameters())
    assert all(
        torch.equal(value, expected_value)
        for value, expected_value in zip(model.parameters(), expected, strict=True)
    )


def test_a_stage_with_some_of_the_modules_has_the_same_values():
    config = modeling.load_config("gla", "debug")
    model = modeling.build(config)
    model.model.embeddings = None
    model.model.layers[0] = None
    _spoil(model)
    modeling.initialize(model, seed=0)
    expected = dict(_initialized(config).named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, expected[name]), name


def test_a_model_without_memory_is_refused():
    with pytest.raises(ModelError, match=r"model.embeddings.weight has no memory"):
        modeling.initialize(modeling.build(modeling.load_config("gla", "debug")), seed=0)


def test_a_parameter_that_the_config_does_not_have_is_refused():
    model = modeling.build(modeling.load_config("gla", "debug"))
    model.model.extra = nn.Linear(2, 2)
    model.to_empty(device="cpu")
    with pytest.raises(ModelError, match=r"extra\.(weight|bias) is not in the model"):
        modeling.initialize(model, seed=0)


def test_a_model_of_another_size_than_its_config_is_refused():
    model = modeling.build(modeling.load_config("gla", "debug"))
    model.config.vocab_size = 100
    model.to_empty(device="cpu")
    with pytest.raises(ModelError, match=r"embeddings.weight .*\(4096, 128\).*\(100, 128\)"):
        modeling.initialize(model, seed=0)


@pytest.mark.parametrize("where", ["layer", "model"])
def test_a_parameter_that_nobody_initialises_is_an_error_with_its_name(monkeypatch, where):
    from fla.models.gla.modeling_gla import GLABlock, GLAModel

    cls = GLABlock if where == "layer" else GLAModel
    original = cls.__init__

    def construct(self, *args, **kwargs):
        original(self, *args, **kwargs)
        self.decay = nn.Parameter(torch.empty(3))

    monkeypatch.setattr(cls, "__init__", construct)
    name = "model.layers.0.decay" if where == "layer" else "model.decay"
    with pytest.raises(ModelError, match=rf"^{name} of model_type 'gla' would be left uninitialised"):
        _initialized(modeling.load_config("gla", "debug"))


def test_an_initialisation_across_modules_is_an_error(monkeypatch):
    from transformers.models.llama.modeling_llama import LlamaModel, LlamaPreTrainedModel

    original = LlamaPreTrainedModel._init_weights

    def across(self, module):
        original(self, module)
        if isinstance(module, LlamaModel):
            nn.init.zeros_(module.embed_tokens.weight)

    monkeypatch.setattr(LlamaPreTrainedModel, "_init_weights", across)
    with pytest.raises(ModelError, match=r"embed_tokens.weight can't .*by itself.*'model'"):
        _initialized(LlamaConfig(**LLAMA))


def test_a_buffer_that_the_model_registers_in_its_layers_is_initialized():
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, head_dim=8)
    mamba = dict(mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8)
    multipliers = [0.5, 0.25, 2.0, 4.0, 8.0]
    config = FalconH1Config(
        vocab_size=128, num_key_value_heads=2, ssm_multipliers=multipliers, **sizes, **mamba
    )
    model = _initialized(config)
    _assert_as_constructed(model)
    assert model.model.layers[1].mamba.mup_vector.unique().tolist() == sorted(multipliers)
