"""Jobs on conversations: two ranks compared with one, resumed jobs, and models that separate conversations."""

import json
import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests import zoo
from tests.support import process_groups
from tests.support.conversations import MARKED, numbered
from tests.support.data_sources import write_rows
from tests.support.step_comparison import summed_cross_entropy
from tests.support.trained_jobs import DEGREE, JOB, MODELS, losses_of, train
from titanplans.cli.main import main
from titanplans.config.schema import build_job
from titanplans.errors import ConfigError
from titanplans.training.trainer import documents

CHAT = ("--training.chat.enable", "--validation.enable", "--validation.freq=4", "--training.steps=8")
UNPACKED = (*CHAT, "--training.chat.no-packing")
SAVING = ("--checkpoint.enable", "--checkpoint.interval=4")
DP_2 = ("--training.local_batch_size=2", "--training.global_batch_size=4")


def write_inputs(folder: Path) -> Path:
    os.environ["TEST_FOLDER"] = str(folder)
    template = f'[training.chat]\nchat_template = "{folder}/chat.jinja"\n'
    (folder / "job.toml").write_text(JOB + template)
    (folder / "chat.jinja").write_text(MARKED)
    for name in ("gla", "dense"):
        (folder / f"{name}.json").write_text(json.dumps(MODELS[name]))
    (folder / "text").mkdir()
    write_rows(folder / "text" / "rows.jsonl", [{"messages": talk} for talk in numbered(60)])
    return folder


def both_losses(folder: Path, *args: str) -> tuple[dict[int, float], dict[int, float]]:
    recorder, _ = train(folder, *args)
    return recorder.losses(), recorder.losses("validation_metrics/loss")


def here() -> Path:
    """Return the folder of the test, after making `datasets` use a cache in it."""
    import datasets

    folder = Path(os.environ["TEST_FOLDER"])
    datasets.config.HF_DATASETS_CACHE = folder / "cache"
    return folder


def on_one_rank(rank: int) -> dict:
    folder = here()
    return {
        "gla": both_losses(folder, "gla", "gla", *CHAT),
        "dense": both_losses(folder, "dense", "dense", *CHAT),
        "unpacked": both_losses(folder, "gla", "unpacked", *UNPACKED),
    }


def on_two_ranks(rank: int) -> dict:
    folder = here()
    results = {
        "gla": both_losses(folder, "gla", "gla-tp", *CHAT, DEGREE, *SAVING),
        "dense": both_losses(folder, "dense", "dense-tp", *CHAT, DEGREE),
        "unpacked": both_losses(folder, "gla", "unpacked-dp", *UNPACKED, *DP_2),
    }
    from_4 = ("--checkpoint.load_step=4", "--checkpoint.load_only")
    results["resumed"] = losses_of(folder, "gla", "gla-tp", *CHAT, *SAVING, *from_4, *DP_2)
    return results


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_inputs(tmp_path_factory.mktemp("chats"))


@pytest.fixture(scope="module")
def one_rank(folder):
    return process_groups.run(on_one_rank, 1)


@pytest.fixture(scope="module")
def two_ranks(folder):
    return process_groups.run(on_two_ranks, 2)


@pytest.mark.parametrize("case", ["gla", "dense", "unpacked"])
def test_two_ranks_have_the_losses_of_one(one_rank, two_ranks, case):
    (training, validation), (expected, expected_validation) = two_ranks[case], one_rank[case]
    assert list(expected) == list(range(1, 9))
    assert training == pytest.approx(expected, rel=1e-5)  # float32, summed in another order
    assert validation == pytest.approx(expected_validation, rel=1e-5)
    assert list(validation) == [1, 4, 8]
    assert expected[8] < expected[1] - 0.2, "a model that does not learn proves nothing"


def test_a_job_is_resumed_in_the_middle_at_another_degree(one_rank, two_ranks):
    assert two_ranks["resumed"] == pytest.approx({n: one_rank["gla"][0][n] for n in range(5, 9)}, rel=1e-5)


def test_the_command_line_reports_the_data_and_refuses_a_model_that_mixes_conversations(
    folder, capsys, monkeypatch, tmp_path
):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    monkeypatch.chdir(tmp_path)
    config = {"model_type": "linear_attn", "hidden_size": 32, "num_hidden_layers": 1, "num_heads": 4}
    (tmp_path / "c.json").write_text(json.dumps(config | {"vocab_size": 4096}))
    arguments = [
        "train",
        f"{folder}/job.toml",
        f"--training.dataset_path={folder}/text",
        "--model.config=c.json",
    ]
    assert main([*arguments, "--training.chat.enable"]) == 2
    message = capsys.readouterr()
    assert "57 of 57 conversations are used (dataset_split = 'train')" in message.out + message.err
    assert "training.chat.packing = true: 'linear_attn' is not known to keep the documents" in message.err


# --- models that separate documents


def influence(model, length=12, boundary=5) -> float:
    """Return the largest change of the second document's logits when the first document changes."""
    name = model.config.model_type
    by = "cu_seqlens" if name in documents.BY_CU_SEQLENS else "position_ids"
    tokens = torch.randint(5, 90, (2, 2, length), generator=torch.Generator().manual_seed(0))
    tokens[1, :, boundary:] = tokens[0, :, boundary:]
    positions = torch.cat([torch.arange(boundary), torch.arange(length - boundary)]).expand(2, -1)
    with torch.no_grad():
        first, second = (
            model(**documents.inputs(t, positions, by), use_cache=False).logits.reshape(2, length, -1)
            for t in tokens
        )
    return (first - second)[:, boundary:].abs().max().item()


KNOWN = documents.BY_CU_SEQLENS | documents.BY_POSITION_IDS
QUICK = ["gla", "transformer", "llama", "gemma3_text"]


@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in sorted(KNOWN - set(QUICK)))]
)
def test_a_change_in_one_document_changes_nothing_in_the_next(name):
    variants = [{}, *zoo.FAMILIES.get(name, ())[1:]]
    for options in variants:
        model = zoo.build(name, dtype=torch.float32, **options).eval()
        assert influence(model) < 1e-6, options  # not 0, because experts sum their tokens in another order


@pytest.mark.parametrize("name", ["gla", "llama"])
def test_packed_conversations_have_the_losses_of_separate_ones(name):
    model = zoo.build(name, dtype=torch.float32).eval()
    lengths = [5, 8, 3]
    tokens = torch.randint(5, 90, (1, 16), generator=torch.Generator().manual_seed(1))
    labels = tokens.roll(-1, 1)
    labels[:, [0, 4, 6, 12]] = -100
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    by = "cu_seqlens" if name == "gla" else "position_ids"
    with torch.no_grad():
        together = summed_cross_entropy(model(**documents.inputs(tokens, positions, by)).logits, labels)
        pairs = zip(tokens.split(lengths, 1), labels.split(lengths, 1), strict=True)
        alone = sum(summed_cross_entropy(model(document).logits, y) for document, y in pairs)
    assert together.item() == pytest.approx(float(alone), rel=1e-6)


CHATS = {"training.chat.enable": True}
APART = "data.documents"


@pytest.mark.parametrize(
    ("options", "model", "expected"),
    [
        (CHATS, {"model_type": "gpt_oss"}, "training.chat.packing = true: 'gpt_oss' is not known to keep"),
        (CHATS | {"training.chat.packing": False}, {"model_type": "gpt_oss"}, False),
        ({}, {"model_type": "gpt_oss"}, False),
        (CHATS, {"model_type": "llama", "_attn_implementation": "flash_attention_2"}, "training.chat.packing"),
        (CHATS, {"model_type": "llama"}, True),
        ({}, {"model_type": "gla"}, True),
        ({}, {"model_type": "mom"}, False),
        ({APART: "apart"}, {"model_type": "llama"}, True),
        ({APART: "joined"}, {"model_type": "llama"}, False),
        ({APART: "apart"}, {"model_type": "mom"}, "data.documents = \"apart\": 'mom' is not known"),
    ],
)  # fmt: skip
def test_documents_are_separated_if_the_model_can_or_the_job_is_refused(options, model, expected):
    job, config = build_job(options), SimpleNamespace(**{"_attn_implementation": "eager"} | model)
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=re.escape(expected)):
            documents.check_documents(job, config)
    else:
        documents.check_documents(job, config)
        assert documents.are_apart(job, documents.document_keyword(job, config)) == expected


def test_a_model_of_the_user_gets_no_document_boundaries():
    config = SimpleNamespace(model_type="llama")
    assert documents.document_keyword(build_job(CHATS), config) == "position_ids"
    assert documents.document_keyword(build_job(CHATS | {"model.class": "module:Class"}), config) is None
