"""A split model in Hugging Face's Trainer, compared with the unsplit model in a plain Trainer."""

import functools
import os

import pytest
import torch
from peft import LoraConfig, PeftModel
from torch import nn
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from examples import transformers_trainer as example
from tests.support import process_groups
from tests.support.refusals import refusal
from titanplans import Degrees, FSDP2Config
from titanplans.config import LoRA
from titanplans.errors import ParallelError
from titanplans.integrations.transformers import split_model
from titanplans.weights.load import load_weights

TOLERANCE = 2e-4
"""A relative tolerance. Sums in another order round differently, and AdamW's first steps divide small gradients by their own
size. So losses and norms differ by up to 4e-5 after eight steps in float32."""


def log_of(history):
    """Return (step, loss, norm) of each training step and (step, loss) of each evaluation."""
    steps = [(row["step"], row["loss"], row["grad_norm"]) for row in history if "loss" in row]
    return steps, [(row["step"], row["eval_loss"]) for row in history if "eval_loss" in row]


def train(rank, folder, degrees, resume=None, **options):
    os.environ["ACCELERATE_USE_CPU"] = (
        "true"  # on a machine with GPUs, too, because the test's process group uses gloo
    )
    return log_of(example.train(str(folder), degrees, resume, use_cpu=True, disable_tqdm=True, **options))


def run(ranks, folder, degrees, resume=None, **options):
    work = functools.partial(train, folder=folder, degrees=degrees, resume=resume, **options)
    return process_groups.run(work, ranks)


def assert_close(log, expected, tolerance=TOLERANCE):
    for rows, others in zip(log, expected, strict=True):
        torch.testing.assert_close(torch.tensor(rows), torch.tensor(others), rtol=tolerance, atol=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("trainer")


@pytest.fixture(scope="module")
def unsplit(folder):
    return run(1, folder / "unsplit", None)


@pytest.fixture(scope="module")
def split(folder):
    return run(2, folder / "split", Degrees(tp=2))


def test_losses_norms_and_evaluations_are_those_of_the_unsplit_model(split, unsplit):
    assert [len(rows) for rows in split] == [8, 2]
    assert_close(split, unsplit)


def test_the_saved_model_is_the_unsplit_one(split, unsplit, folder):
    ours, expected = (
        AutoModelForCausalLM.from_pretrained(folder / name / "final").state_dict()
        for name in ("split", "unsplit")
    )
    assert ours.keys() == expected.keys()
    for name, tensor in ours.items():
        # An update of AdamW changes a weight by up to 1e-2.
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=2e-3)


@pytest.mark.thorough
@pytest.mark.parametrize(("ranks", "degrees"), [(2, Degrees(tp=2)), (4, Degrees(tp=4))])
def test_a_checkpoint_resumes_at_the_same_and_at_another_degree(split, folder, ranks, degrees):
    resumed = run(ranks, folder / f"resumed-{ranks}", degrees, str(folder / "split" / "checkpoint-4"))
    assert_close(resumed, split)


@pytest.mark.thorough
def test_data_parallel_ranks_read_other_batches_and_average_gradients(folder, unsplit):
    """Two data-parallel ranks, which are two tensor-parallel ranks each, read two sequences each."""
    options = dict(per_device_train_batch_size=2, gradient_checkpointing=True)
    assert_close(run(4, folder / "data", Degrees(tp=2, dp_shard=2), **options)[0], unsplit[0])


@pytest.mark.thorough
def test_without_clipping_gradients_are_summed_all_the_same(folder):
    options = dict(max_grad_norm=0.0, save_strategy="no", max_steps=4)
    assert_close(
        run(2, folder / "free", Degrees(tp=2), **options)[0], run(1, folder / "free-1", None, **options)[0]
    )


@pytest.mark.thorough
def test_autocast_is_the_trainers(folder):
    options = dict(bf16=True, save_strategy="no", max_steps=4)
    split, unsplit = (
        run(2, folder / "b", Degrees(tp=2), **options)[0],
        run(1, folder / "b1", None, **options)[0],
    )
    # Rounding to bfloat16 changes a value by up to a relative 4e-3, and a norm sums many such values.
    assert_close([split], [unsplit], tolerance=2e-2)


def logits_from_meta(rank, folder):
    os.environ["ACCELERATE_USE_CPU"] = "true"
    with torch.device("meta"):
        model = example.small_model()
    load_weights(split_model(model, Degrees(tp=2)), folder)
    return model.eval()(torch.arange(8).view(1, 8)).logits.detach()


@pytest.mark.thorough
def test_a_model_on_meta_is_allocated_and_loaded_after_the_split(unsplit, folder):
    saved = folder / "unsplit" / "final"
    expected = AutoModelForCausalLM.from_pretrained(saved)(torch.arange(8).view(1, 8)).logits
    actual = process_groups.run(functools.partial(logits_from_meta, folder=saved), 2)
    torch.testing.assert_close(actual, expected.detach(), rtol=1e-4, atol=1e-5)


LORA = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"])


def adapted(rank, folder, split):
    """Train and save adapters; return the log. The unsplit model has titanplans' adapters and a plain Trainer."""
    from titanplans import add_adapters

    os.environ["ACCELERATE_USE_CPU"] = "true"
    model = example.small_model()
    kinds = dict(use_cpu=True, disable_tqdm=True, report_to="none", logging_steps=1, learning_rate=1e-2)
    arguments = TrainingArguments(str(folder), max_steps=4, save_strategy="no", **kinds)
    if split:
        model, trainer = split_model(model, Degrees(tp=2), lora=LORA), example.MyTrainer
    else:
        add_adapters(model, LoRA(rank=4, alpha=8, target_modules=("q_proj", "down_proj")))
        trainer = Trainer
    trainer = trainer(model, arguments, train_dataset=example.sequences())
    trainer.train()
    if split:
        trainer.save_model(f"{folder}/final")
    return log_of(trainer.state.log_history)[0]


@pytest.mark.thorough
def test_adapters_by_pefts_config_are_saved_as_pefts_files(folder):
    split, unsplit = (
        process_groups.run(
            functools.partial(adapted, folder=folder / f"lora-{ranks}", split=ranks > 1), ranks
        )
        for ranks in (2, 1)
    )
    assert_close([split], [unsplit])
    loaded = PeftModel.from_pretrained(example.small_model(), folder / "lora-2" / "final")
    assert loaded.peft_config["default"].r == 4
    assert any(parameter.abs().sum() > 0 for name, parameter in loaded.named_parameters() if "lora_B" in name)


def refusals(rank):
    """Return the refusals of a split model's trainer and of `split_model`, by subject."""
    os.environ["ACCELERATE_USE_CPU"] = "true"
    model = example.small_model()
    errors = {
        "cp": refusal(split_model, model, Degrees(cp=2)),
        "loss parallel": refusal(split_model, model, Degrees(tp=2), FSDP2Config()),
        "rslora": refusal(
            split_model, model, Degrees(tp=2), lora=LoraConfig(target_modules=["q_proj"], use_rslora=True)
        ),
        "lora's targets": refusal(split_model, model, Degrees(tp=2), lora=LoraConfig()),
        "unsplit": refusal(example.MyTrainer, model, kind=ParallelError),
    }
    split_model(model, Degrees(tp=2))
    errors["peft"] = refusal(example.MyTrainer, model, peft_config=LORA)
    errors["ddp"] = refusal(nn.parallel.DistributedDataParallel, model)
    return errors


def test_what_can_not_be_right_is_refused():
    errors = process_groups.run(refusals, 2)
    assert errors["cp"].endswith("set cp and pp to 1")
    assert errors["loss parallel"] == (
        "disable_loss_parallel = false: the Trainer's losses need plain logits; set it to true"
    )
    assert errors["rslora"].startswith("lora has use_rslora = true, but only plain LoRA")
    assert errors["lora's targets"].endswith("name the modules, and leave init_lora_weights at True")
    assert errors["unsplit"].endswith("call titanplans.integrations.transformers.split_model first")
    assert errors["peft"].endswith("pass it as split_model(..., lora=...)")
    assert errors["ddp"].startswith("DistributedDataParallel can't wrap a split model")
