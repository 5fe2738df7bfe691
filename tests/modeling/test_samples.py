"""Models and inputs for a proof: every parameter affects the loss, and the tokens of an image attend to each other."""

import pytest
import torch

from tests import zoo
from titanplans import modeling
from titanplans.kernels.widen import Widen
from titanplans.modeling import ModelError

NAMES = sorted(zoo.ARCHITECTURES)
OF_TRANSFORMERS = [name for name in NAMES if name not in ("transformer", "gla")]


pytestmark = pytest.mark.usefixtures("cpu_kernels")


def _config(name, attention="sdpa", **overrides):
    config = modeling.load_config(name, "debug", **overrides)
    if name in OF_TRANSFORMERS:
        config._attn_implementation = attention
    return config


def _loss(model, inputs):
    logits = model(**inputs).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), inputs["input_ids"].flatten())


@pytest.mark.parametrize("seq_len", [24, 64])
@pytest.mark.parametrize(
    ("name", "attention"),
    [(name, "sdpa") for name in NAMES] + [(name, "eager") for name in OF_TRANSFORMERS],
)
def test_every_parameter_affects_the_loss_in_float64(name, attention, seq_len):
    config = _config(name, attention)
    model = modeling.build_real(config)
    inputs = modeling.sample_inputs(config, batch_size=2, seq_len=seq_len, seed=0)
    loss = _loss(model, inputs)
    loss.backward()
    assert loss.dtype == torch.float64
    text = model.config.get_text_config()
    assert name not in OF_TRANSFORMERS or text._attn_implementation == attention
    largest = max(p.grad.abs().max() for p in model.parameters())
    for parameter_name, parameter in model.named_parameters():
        assert parameter.dtype == torch.float64
        assert parameter.grad.isfinite().all()
        relative = parameter.grad.abs().max() / largest
        if "vision_tower" in parameter_name and parameter_name.endswith("self_attn.k_proj.bias"):
            # Without rotary embeddings this bias adds the same value to all scores of a query, which softmax cancels. Its
            # gradient is only a rounding error, in eager attention one of float32.
            assert relative < 1e-7, parameter_name
        else:
            assert relative > 1e-6, parameter_name


@pytest.mark.parametrize("name", OF_TRANSFORMERS)
def test_both_attention_implementations_agree(name):
    inputs = modeling.sample_inputs(_config(name), batch_size=2, seq_len=48, seed=0)
    runs = []
    for attention in ("sdpa", "eager"):
        model = modeling.build_real(_config(name, attention))
        with Widen(torch.float64):
            loss = _loss(model, inputs)
            loss.backward()
        runs.append({n: p.grad for n, p in model.named_parameters()} | {"loss": loss.detach()})
    sdpa, eager = runs
    for key, value in sdpa.items():
        # Both sum float64 in different orders, a few hundred terms through four layers. Measured: 1e-14.
        assert (eager[key] - value).abs().max() <= 1e-12 * max(value.abs().max(), 1e-3), key


def test_a_model_is_reproducible_and_the_same_in_every_dtype():
    config = _config("qwen3")
    first, again, rounded, of_other_seed = (
        modeling.build_real(config, **options).state_dict()
        for options in ({}, {}, {"dtype": torch.float32}, {"seed": 1})
    )
    for name, value in first.items():
        assert torch.equal(again[name], value)
        assert torch.equal(rounded[name], value.float())
        assert not torch.equal(of_other_seed[name], value)
    assert torch.get_default_dtype() == torch.float32


def test_the_random_state_of_the_caller_is_unchanged():
    torch.manual_seed(5)
    state = torch.get_rng_state()
    config = _config("gemma3")
    modeling.build_real(config)
    modeling.sample_inputs(config, batch_size=1, seq_len=8, seed=0)
    assert torch.equal(torch.get_rng_state(), state)


def test_noise_is_added_where_all_values_are_equal():
    config = _config("gemma3", tie_word_embeddings=True)
    plain, noisy = modeling.build_real(config, noise=0.0), modeling.build_real(config, noise=0.1)
    moved = 0
    for (name, before), after in zip(plain.named_parameters(), noisy.parameters(), strict=True):
        if before.min() == before.max():
            assert after.std().item() == pytest.approx(0.1, rel=0.5), name  # from 16 values or more
            moved += 1
        else:
            assert torch.equal(before, after), name
    # Norms of the text model; norms of the tower, with biases; biases of its projections and patches; the projector.
    assert moved == (4 * 6 + 1) + 2 * (2 * 2 + 1) + (2 * 4 + 1) + 2
    assert noisy.lm_head.weight is noisy.model.language_model.embed_tokens.weight


@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_from_the_full_vocabulary_except_special_ones(name):
    config = _config(name, vocab_size=16) if name != "gemma3" else _config(name, vocab_size=4096)
    if name == "gemma3":  # 4 of 16 tokens are special
        config.text_config.vocab_size = 16
        config.boi_token_index, config.eoi_token_index, config.image_token_index = 13, 14, 15
    inputs = modeling.sample_inputs(config, batch_size=8, seq_len=200, seed=3)
    ids = inputs["input_ids"]
    assert (ids.shape, ids.dtype) == ((8, 200), torch.int64)
    expected = set(range(16)) - {config.get_text_config().pad_token_id}
    drawn = ids if name != "gemma3" else ids[inputs["token_type_ids"] == 0]
    assert set(drawn.unique().tolist()) == expected - ({13, 14, 15} if name == "gemma3" else set())
    assert torch.equal(modeling.sample_inputs(config, batch_size=8, seq_len=200, seed=3)["input_ids"], ids)
    assert not torch.equal(
        modeling.sample_inputs(config, batch_size=8, seq_len=200, seed=4)["input_ids"], ids
    )


@pytest.mark.parametrize("seq_len", [6, 7, 24, 32, 64])
def test_images_extend_across_shards(seq_len):
    config = _config("gemma3")
    inputs = modeling.sample_inputs(config, batch_size=4, seq_len=seq_len, seed=0)
    is_image = inputs["input_ids"] == config.image_token_id
    assert torch.equal(inputs["token_type_ids"], is_image.long())
    assert inputs["pixel_values"].shape == (4, 3, 56, 56)
    starts = set()
    for sequence in is_image:
        (positions,) = sequence.nonzero(as_tuple=True)
        assert positions.tolist() == list(range(positions[0], positions[0] + 4)), "one run of four"
        assert not sequence[0]
        assert not sequence[-1]
        for degree in (2, 4, 8):
            if seq_len % degree == 0:
                assert len((positions // (seq_len // degree)).unique()) > 1, "a shard has the full image"
        starts.add(positions[0].item())
    assert len(starts) == (1 if seq_len == 6 else 3 if seq_len > 7 else 2)


def test_the_tokens_of_an_image_attend_to_each_other():
    """Changing the last image token's embedding changes the first image token's output, but only with token_type_ids."""
    config = _config("gemma3")
    model = modeling.build_real(config)
    inputs = modeling.sample_inputs(config, batch_size=1, seq_len=24, seed=0)
    (places,) = inputs["token_type_ids"][0].nonzero(as_tuple=True)
    first = places[0].item()
    bottom = inputs["pixel_values"].clone()
    bottom[:, :, 28:] += 1.0

    def logits(**changes):
        with torch.no_grad():
            return model(**(inputs | changes)).logits[0]

    moved = (logits(pixel_values=bottom) - logits()).abs().amax(-1)
    assert not moved[:first].any(), "text before the image"
    assert (moved[first:] > 0).all()
    causal = logits(token_type_ids=None)
    assert (logits() - causal).abs().amax(-1)[first] > 0
    assert not (logits() - causal)[:first].any()


def test_an_image_token_outside_the_vocabulary_works():
    config = _config("gemma3", vocab_size=512)
    inputs = modeling.sample_inputs(config, batch_size=1, seq_len=24, seed=0)
    assert inputs["input_ids"].max() == 4095
    assert modeling.build_real(config)(**inputs).logits.shape == (1, 24, 512)


def test_a_sequence_without_room_for_an_image_is_refused():
    with pytest.raises(ModelError, match=r"seq_len = 5 is too short.*4 tokens.*need 6"):
        modeling.sample_inputs(_config("gemma3"), batch_size=1, seq_len=5, seed=0)


def test_inputs_of_an_unknown_modality_are_refused():
    from transformers import LlavaConfig

    with pytest.raises(ModelError, match=r"'llava' takes more inputs than tokens"):
        modeling.sample_inputs(LlavaConfig(), batch_size=1, seq_len=32, seed=0)


def test_a_vocabulary_of_special_tokens_is_refused():
    config = _config("gemma3_text", vocab_size=1)
    with pytest.raises(ModelError, match="vocab_size = 1 has only special tokens"):
        modeling.sample_inputs(config, batch_size=1, seq_len=4, seed=0)
