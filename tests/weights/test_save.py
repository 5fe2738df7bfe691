"""A split model saved as a Hugging Face folder: transformers loads it in one process and computes the same logits."""

import json
import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from tests import zoo
from tests.support import process_groups
from tests.support.system import largest_file
from titanplans import Degrees, FSDP2Config, ParallelManager, UserError
from titanplans.errors import NotSaved
from titanplans.split.objects import gather_objects
from titanplans.weights.files import refuse_full
from titanplans.weights.save import save_weights

pytestmark = pytest.mark.thorough

SPLITS = {"tp 2": Degrees(dp_replicate=2, dp_shard=1, tp=2), "fsdp 2 x tp 2": Degrees(tp=2)}
# These have shared key/value heads, odd sizes, tied heads, experts that the hub stores one by one, and vision towers.
MODELS = {
    "llama": dict(num_key_value_heads=1, **zoo.ODD),
    "qwen2": dict(num_key_value_heads=2, tie_word_embeddings=True),
    "qwen3": zoo.ODD,
    "gemma3_text": {},
    "gemma3": {},
    "gla": {},
    "transformer": {},
    "mixtral": {},
    "qwen3_moe": {},
}


def build(name, dtype=torch.float32):
    return zoo.build(name, dtype=dtype, **MODELS[name])


def split(name, degrees):
    return ParallelManager(FSDP2Config(), degrees, device_type="cpu").parallelize(build(name))


def refused(action):
    try:
        action()
    except (UserError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def save_all(rank):
    folder = Path(os.environ["TEST_FOLDER"])
    for case, degrees in SPLITS.items():
        for name in MODELS:
            small = dict(max_shard_size=40_000) if case == "tp 2" else {}
            save_weights(split(name, degrees), folder / case / name, **small)
    model = split("qwen2", SPLITS["tp 2"])
    save = partial(save_weights, model, folder / "bf16")
    save(dtype=torch.bfloat16, tokenizer=folder / "tokenizer")
    (folder / ".killed.writing").mkdir(exist_ok=True)
    message = {
        "there": refused(save),
        "killed": refused(partial(save_weights, model, folder / "killed")),
        "size": refused(partial(save_weights, model, folder / "new", max_shard_size="5 bananas")),
        "tokenizer": refused(partial(save_weights, model, folder / "new", tokenizer=folder / "tp 2")),
        "place": refused(partial(save_weights, model, folder / "tokenizer" / "tokenizer.json" / "new")),
    }
    (folder / "linked").mkdir(exist_ok=True)
    (folder / "link").symlink_to(folder / "linked") if rank == 0 else None
    save_weights(model, folder / "link")
    model.config.temperature = (
        0.5  # transformers treats this field as an option of generation, and refuses to save it
    )
    message["of a library"] = refused(partial(save_weights, model, folder / "new"))
    del model.config.temperature
    message["no config"] = refused(partial(save_weights, torch.nn.Linear(2, 2), folder / "new"))
    model.register_buffer("unheard", torch.ones(3))
    message["of its config"] = refused(partial(save_weights, model, folder / "new"))
    model = split("qwen2", SPLITS["tp 2"])
    with largest_file(20_000):
        message["full"] = refused(partial(save_weights, model, folder / "new"))
    assert all(others == message for others in gather_objects(message))
    return message


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    (folder / "tokenizer").mkdir()
    for name in ("tokenizer.json", "merges.txt", "notes.txt"):
        (folder / "tokenizer" / name).write_text("{}")
    os.environ["TEST_FOLDER"] = str(folder)
    return folder, process_groups.run(save_all, 4)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("case", SPLITS)
def test_transformers_loads_it_with_the_same_logits(saved, case, name):
    model, inputs = build(name).eval(), zoo.inputs(name)
    loaded, report = AutoModelForCausalLM.from_pretrained(saved[0] / case / name, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert type(loaded) is type(model)
    assert loaded.config.architectures == [type(model).__name__]
    assert loaded.config.get_text_config().use_cache
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.float32}
    with torch.no_grad():
        assert torch.equal(loaded.eval()(**inputs).logits, model(**inputs).logits)


def tensors_in(folder):
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  `opened` is no dict
    return tensors


@pytest.mark.parametrize("name", ["qwen2", "gemma3", "mixtral", "qwen3_moe"])
def test_the_folder_has_the_tensors_of_save_pretrained(saved, tmp_path, name):
    build(name).save_pretrained(tmp_path)
    expected, actual = tensors_in(tmp_path), tensors_in(saved[0] / "fsdp 2 x tp 2" / name)
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[each], tensor) for each, tensor in expected.items())


def test_files_have_the_chosen_size_and_an_index(saved):
    folder = saved[0] / "tp 2" / "mixtral"
    files = sorted(folder.glob("*.safetensors"))
    assert [file.name for file in files] == [
        f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)
    ]
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == tensors_in(folder).keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors_in(folder).values())
    assert index["metadata"]["total_parameters"] == build("mixtral").num_parameters()
    for file in files:
        with safe_open(file, framework="pt") as opened:
            sizes = [opened.get_tensor(name).nbytes for name in opened.keys()]  # noqa: SIM118
        assert sum(sizes) <= 40_000 or len(sizes) == 1


def test_the_dtype_is_the_chosen_one_and_the_tokenizer_is_saved(saved):
    folder = saved[0] / "bf16"
    assert {tensor.dtype for tensor in tensors_in(folder).values()} == {torch.bfloat16}
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        "merges.txt",
        "model.safetensors",
        "tokenizer.json",
    ]
    expected = build("qwen2").to(torch.bfloat16).state_dict()
    loaded = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())


def test_a_refused_save_raises_on_every_rank_and_leaves_nothing(saved):
    folder, message = saved
    begin = {
        "there": "ModelError: /bf16 already exists",
        "killed": "ModelError: /.killed.writing exists: another process is writing /killed",
        "size": "ModelError: max_shard_size = '5 bananas' is not a size",
        "tokenizer": "ModelError: tokenizer = '/tp 2': there is no tokenizer.json",
        "place": "NotSaved: /tokenizer/tokenizer.json/.new.writing can't be written (Not a directory)",
        "of a library": "NotSaved: /.new.writing can't be written: ValueError: ",
        "of its config": "ModelError: these are not the weights of a Qwen2ForCausalLM with this config: 1 tensor unexpected "
        "(unheard)",
        "no config": "ModelError: Linear has no config of transformers",
        "full": "NotSaved: /.new.writing can't be written (File too large)",
    }
    lines = {case: line.replace(str(folder), "") for case, line in message.items()}
    assert {case: line[: len(begin[case])] for case, line in lines.items()} == begin
    assert not [
        path for path in folder.iterdir() if path.name.startswith(".") and path.name != ".killed.writing"
    ]
    assert not (folder / "new").exists()
    assert (folder / "link").is_symlink()
    assert (folder / "linked" / "model.safetensors").exists()


def test_the_space_to_free_is_reported(tmp_path, monkeypatch):
    """Rounding must not turn the message into "0.01 GB of free space, but 0.01 GB have to be written"."""
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=10_000_000))
    with pytest.raises(
        NotSaved, match=r"has 10\.0 MB of free space, but 10\.0 MB have to be written; free 20\.0 kB$"
    ):
        refuse_full(tmp_path, 10_020_000)
