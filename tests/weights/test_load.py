"""A Hugging Face folder loaded into a split model: tensors equal `from_pretrained`'s, and a rank reads only its shards."""

import functools
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from tests import zoo
from tests.support import process_groups
from tests.support.refusals import refusal_or_none
from tests.support.step_comparison import full_copy
from titanplans import kernels, load_weights, modeling
from titanplans.errors import ModelError
from titanplans.parallel import DDPConfig, Degrees, FSDP2Config, ParallelManager

FSDP2 = FSDP2Config()
TWO = {
    "transformer": {},
    "gla": {},
    "llama": zoo.ODD | dict(num_key_value_heads=1),  # both ranks share the key/value head
    "qwen2": dict(tie_word_embeddings=True),
    "qwen3": {},
    "gemma3_text": {},
    "gemma3": {},
    "mixtral": {},
    "qwen2_moe": {},
    "phi3": dict(vocab_size=97),
    "gpt_neox": {},
}
"""The models for two ranks, with config fields that differ from the zoo's."""
FOUR = {
    "tp 4": ("llama", FSDP2, Degrees(tp=4)),
    "fsdp 2 x tp 2": ("llama", FSDP2, Degrees(tp=2)),
    "fsdp 2 x tp 2, experts": ("mixtral", FSDP2, Degrees(tp=2)),
    "fsdp 2 x tp 2, tied": ("qwen2", FSDP2, Degrees(tp=2)),
    "hsdp 2 x 2": ("llama", FSDP2, Degrees(dp_replicate=2)),
    "fsdp 4, offloaded": ("llama", FSDP2Config(enable_cpu_offload=True), Degrees()),
    "ddp": ("llama", DDPConfig(), None),
}


def differing(model, folder):
    """Return the names of the tensors of a split model that differ from those of `from_pretrained`."""
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    values = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    values = {name: full_copy(value) for name, value in values.items()}
    theirs = {
        **dict(expected.named_parameters(remove_duplicate=False)),
        **dict(expected.named_buffers()),
    }
    assert values.keys() == theirs.keys()
    return [name for name in values if not torch.equal(values[name], theirs[name])]


def load(folder, strategy, degrees):
    """Return the split model, the result of `load_weights`, and the bytes of this rank's shards."""
    manager = ParallelManager(strategy, degrees, device_type="cpu")
    model = modeling.build(modeling.load_config_file(folder))
    if isinstance(strategy, DDPConfig):  # DDP needs a model with weights
        model.to_empty(device="cpu")
    else:
        manager.parallelize(model)
        manager.to_empty()
    for parameter in model.parameters():
        parameter.data.fill_(torch.nan)
    loaded = load_weights(model, folder)
    if isinstance(strategy, DDPConfig):
        manager.parallelize(model)
    saved = {id(model.get_parameter_or_buffer(name)) for name in model.state_dict()}
    local = [
        tensor.to_local() if isinstance(tensor, DTensor) else tensor
        for tensor in (*model.parameters(), *model.buffers())
        if id(tensor) in saved
    ]
    return model, loaded, sum(shard.numel() * 4 for shard in local)


def in_two(rank, folders):
    kernels.install("cpu")
    results = {}
    for name in TWO:
        model, loaded, local = load(folders[name], FSDP2, Degrees(tp=2))
        results[name] = differing(model, folders[name]), loaded.bytes_read - local, loaded.bytes_read
    results["two heads"] = refusal_or_none(load, folders["two heads"], FSDP2, Degrees(tp=2), kind=ModelError)
    return results


def in_four(rank, folders):
    results = {}
    for case, (name, strategy, degrees) in FOUR.items():
        model, loaded, local = load(folders[name], strategy, degrees)
        results[case] = differing(model, folders[name]), loaded.bytes_read - local
    return results


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    paths = {}
    for name, options in TWO.items():
        paths[name] = str(tmp_path_factory.mktemp(name))
        zoo.build(name, dtype=torch.float32, **options).save_pretrained(paths[name], max_shard_size="100KB")
    # The head differs from the embedding only in the last row, which is on rank 1 of two.
    paths["two heads"] = str(tmp_path_factory.mktemp("heads"))
    model = zoo.build("qwen2", dtype=torch.float32, tie_word_embeddings=True)
    model.save_pretrained(paths["two heads"])
    file = Path(paths["two heads"]) / "model.safetensors"
    values = load_file(file)
    head = values["model.embed_tokens.weight"].clone()
    head[-1] += 1
    save_file(values | {"lm_head.weight": head}, file)
    return paths


@pytest.fixture(scope="module")
def two_ranks(folders):
    return process_groups.run(functools.partial(in_two, folders=folders), ranks=2)


@pytest.fixture(scope="module")
def four_ranks(folders):
    return process_groups.run(functools.partial(in_four, folders=folders), ranks=4)


@pytest.mark.parametrize("name", TWO)
def test_two_ranks_have_the_tensors_of_one_process_and_read_only_their_shards(two_ranks, name):
    differing, more_than_local, _ = two_ranks[name]
    assert differing == []
    assert more_than_local == 0


@pytest.mark.parametrize("case", FOUR)
def test_any_strategy_on_four_ranks(four_ranks, case):
    assert four_ranks[case] == ([], 0)


def test_all_ranks_refuse_a_head_that_differs_on_one(two_ranks):
    assert "has lm_head.weight and model.embed_tokens.weight with different values" in two_ranks["two heads"]


def test_a_rank_of_two_reads_about_half(two_ranks, folders):
    for name in ("transformer", "mixtral", "qwen2_moe"):
        total = sum(file.stat().st_size for file in Path(folders[name]).glob("*.safetensors"))
        assert two_ranks[name][2] < 0.55 * total, name
