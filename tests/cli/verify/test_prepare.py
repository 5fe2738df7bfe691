"""Models truncated to fewer blocks and a smaller vocabulary, and the memory that a proof needs."""

import pytest
import torch
from transformers import Qwen2VLConfig

from tests import zoo
from titanplans import Degrees, modeling, registered_plans
from titanplans.cli.verify.arguments import parse
from titanplans.cli.verify.prepare import check_memory, memory
from titanplans.cli.verify.smaller_config import _smaller_vocabulary, _with_vocabulary, reduce_config
from titanplans.cli.verify.subject import Subject, every_model, find_subject
from titanplans.errors import VerifyError
from titanplans.split.decoder import find_decoder

CPU = torch.device("cpu")


pytestmark = pytest.mark.usefixtures("cpu_kernels")


def test_every_named_model_has_a_registered_plan_and_its_own_model_type():
    assert every_model() == list(modeling.available())
    for name in modeling.available():
        assert modeling.load_config(name, "debug").model_type == name
        assert name in registered_plans()


def hybrid(**options):
    attn = {"layers": [2, 5], "num_heads": 4}
    return Subject("hybrid", zoo.config("gla", num_hidden_layers=8, vocab_size=100, attn=attn, **options))


def named(name, flavor):
    return Subject(f"{name}, flavor {flavor}", modeling.load_config(name, flavor))


@pytest.mark.parametrize(
    ("source", "layers", "blocks", "all_blocks"),
    [
        (
            lambda: named("qwen3", "0.6B"),
            None,
            2,
            28,
        ),  # the blocks are equal, but the stream begins at the first one
        (lambda: named("qwen3", "0.6B"), 5, 5, 28),
        (lambda: named("qwen3", "debug"), 4, 4, 4),
        (lambda: named("gemma3_text", "debug"), None, 2, 4),  # a sliding window, then full attention
        (lambda: named("gemma3_text", "1B"), None, 6, 26),  # five sliding windows, then full attention
        (lambda: named("gemma3", "4B"), None, 6, 34),
        (lambda: named("rwkv7", "debug"), None, 2, 4),  # each block depends on the number of blocks
        (hybrid, None, 3, 8),
        (hybrid, 2, 2, 8),
    ],
)
def test_the_first_blocks(source, layers, blocks, all_blocks):
    config, model, notes = reduce_config(source(), layers, None)
    same = ": the others have the same classes, shapes, settings and plan (--layers)"
    expected = (
        [f"the first {blocks} of {all_blocks} blocks{'' if layers else same}"] if blocks < all_blocks else []
    )
    assert [note for note in notes if "vocabulary" not in note] == expected
    assert len(find_decoder(model).blocks) == blocks
    text = config.get_text_config()
    assert text.num_hidden_layers == blocks
    assert len(getattr(text, "layer_types", None) or range(blocks)) == blocks
    assert all(p.is_meta for p in model.parameters())


def test_lists_with_an_entry_for_each_block_are_truncated_too():
    config, *_ = reduce_config(named("gemma3_text", "1B"), 7, None)
    assert config.layer_types == modeling.load_config("gemma3_text", "1B").layer_types[:7]
    assert config.sliding_window == 512
    assert reduce_config(hybrid(), None, None)[0].attn["layers"] == [2]
    # A larger vision tower is truncated to the same number of blocks.
    assert reduce_config(named("gemma3", "4B"), 3, None)[0].vision_config.num_hidden_layers == 3


@pytest.mark.parametrize(("name", "flavor"), [("qwen3", "0.6B"), ("gemma3", "4B"), ("gla", "340M")])
def test_a_smaller_vocabulary(name, flavor):
    _, model, notes = reduce_config(named(name, flavor), None, 1000)
    assert notes[1].startswith("a vocabulary of 1,000 instead of ")
    assert model.get_input_embeddings().weight.shape[0] == 1000
    assert model.get_output_embeddings().weight.shape[0] == 1000


def test_more_blocks_or_tokens_than_there_are_are_refused():
    with pytest.raises(VerifyError, match=r"--layers 29: qwen3, .*0.6B has 28"):
        reduce_config(named("qwen3", "0.6B"), 29, None)
    with pytest.raises(VerifyError, match=r"--vocab-size 4097: qwen3, .*debug has 4,096"):
        reduce_config(named("qwen3", "debug"), None, 4097)


def test_a_proof_larger_than_memory_is_refused():
    model = modeling.build(modeling.load_config("llama", "3.1-70B"))
    # Twelve copies of 70.6e9 float64 values.
    expected = r"^a proof of 70,553,706,496 parameters in float64 needs more than 6,773\.2 GB"
    with pytest.raises(VerifyError, match=expected):
        check_memory(model, 32, torch.float64, CPU)
    with pytest.raises(VerifyError, match=r"in float32 needs more than 3,386\.6 GB"):
        check_memory(model, 32, torch.float32, CPU)


def test_a_small_proof_fits():
    assert memory(CPU) > 2**28
    small = modeling.build(modeling.load_config("qwen3", "debug"))
    check_memory(small, 32, torch.float64, CPU)
    with pytest.raises(VerifyError, match=r"logits of 1,000,000,000 tokens"):
        check_memory(small, 10**9, torch.float64, CPU)


def test_special_tokens_of_images_and_videos_stay_distinct():
    config = Qwen2VLConfig(text_config={"vocab_size": 152_064})
    size = _smaller_vocabulary(config)
    small = _with_vocabulary(config, size)
    special = (small.image_token_id, small.video_token_id, small.vision_start_token_id)
    assert size == 768
    assert special == (359, 360, 356)  # the distance to the end of the vocabulary is unchanged


@pytest.mark.parametrize(
    ("arguments", "degrees"),
    [
        ("", [Degrees(tp=2, cp=2)]),
        ("--tp 4", [Degrees(tp=4, cp=2)]),
        ("--cp 1,4", [Degrees(tp=2), Degrees(tp=2, cp=4)]),
        ("--cp 1 --tp 1 --process-group", [Degrees(tp=1)]),
    ],
)
def test_degrees_not_on_the_command_line_are_those_of_the_job(tmp_path, arguments, degrees):
    job = tmp_path / "job.toml"
    job.write_text("[parallelism]\ntensor_parallel_degree = 2\ncontext_parallel_degree = 2\n")
    request = parse(["verify", str(job), *arguments.split()])
    assert find_subject(str(job), request).degrees == tuple(degrees)
