"""Jobs of mixtures of experts: the load-balancing loss (`output_router_logits`), and biases of routers."""

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import nn
from transformers import Ernie4_5_MoeConfig
from transformers.modeling_outputs import CausalLMOutputWithPast

from tests import zoo
from tests.support.jobs import Job
from titanplans import modeling
from titanplans.config import Compile
from titanplans.errors import ModelError, ParallelError
from titanplans.loss import added_loss
from titanplans.modeling.samples import build_real
from titanplans.parallel.compile import apply_compile, one_graph_a_block
from titanplans.split.experts.loads import Loads, find_mixtures
from titanplans.training.checkpoint.match import tensors_of
from titanplans.training.checkpoint.storage import CheckpointReader
from titanplans.training.trainer.model import LanguageModel

BALANCED = {"vocab_size": 4096, "output_router_logits": True, "router_aux_loss_coef": 0.5}


def test_the_load_balancing_loss_is_added_at_every_degree(tmp_path):
    """With two experts per token, the loss of a balanced router is 2; an untrained model's cross entropy is log 4096."""
    job, losses = Job(tmp_path), {}
    zoo.config("mixtral", **BALANCED).save_pretrained(tmp_path)
    for degree in (1, 2):
        arguments = (f"--parallelism.tensor_parallel_degree={degree}", f"--job.dump_folder=out{degree}")
        arguments += ("--model.config=config.json", "--training.steps=3", "--checkpoint.no-enable")
        assert job.run(*arguments) == 0, job.err
        losses[degree] = [float(loss) for _, loss in job.losses]
    assert len(losses[1]) == 3
    assert losses[2] == pytest.approx(losses[1], abs=2e-4)
    assert losses[2][0] == pytest.approx(math.log(4096) + 0.5 * 2, abs=0.1)


def test_a_job_logs_how_biases_move_and_keeps_them_in_float32(tmp_path):
    job, bias = Job(tmp_path), "model.layers.1.mlp.gate.e_score_correction_bias"
    config = zoo.config("deepseek_v3", vocab_size=4096)
    config.save_pretrained(tmp_path)
    arguments = ("--model.config=config.json", "--training.steps=2", "--checkpoint.interval=1")
    dtypes = ("--training.dtype=bfloat16", "--checkpoint.export_dtype=bfloat16")
    assert job.run(*arguments, *dtypes) == 0, job.err
    assert "keep experts equally busy, in 1 routers, change by 0.001 per step" in job.out + job.err
    for step in (1, 2):
        reader = CheckpointReader(tmp_path / "out" / "checkpoint" / f"step-{step}")
        saved = tensors_of(reader.read_metadata().state_dict_metadata)
        dtypes = {name: tensor.dtype for name, tensor in saved.items()}
        in_float32 = {f"model.layers.1.mlp.{name}" for name in zoo.float32_of_routers()}
        assert bias in in_float32
        assert {name for name, dtype in dtypes.items() if dtype == torch.float32} == in_float32
        assert set(dtypes.values()) == {torch.float32, torch.bfloat16}


@pytest.mark.parametrize(
    ("config", "bias"),
    [
        (zoo.config("glm4_moe"), "model.layers.1.mlp.gate.e_score_correction_bias"),
        (Ernie4_5_MoeConfig(num_hidden_layers=2), "model.layers.1.mlp.gate.moe_statics.e_score_correction_bias"),
        (zoo.config("mixtral"), None),
    ],
)  # fmt: skip
def test_biases_without_gradient_are_found(config, bias):
    model = modeling.build(config)
    biases = [mixture.bias for mixture in find_mixtures(model) if mixture.bias is not None]
    names = {id(x): name for name, x in (*model.named_buffers(), *model.named_parameters())}
    assert [names[id(x)] for x in biases[:1]] == [bias] * (bias is not None)


def test_loads_are_counted_once_in_training_and_even_out_by_the_biases():
    model = zoo.build("glm4_moe", num_hidden_layers=3).float().train()
    for layer in model.model.layers:
        layer.mlp = GradientCheckpointed(layer.mlp)
    loads, tokens = Loads(model), torch.arange(48).view(2, 24)
    first = None
    for _ in range(300):
        model(tokens).logits.sum().backward()
        counts = loads.take([])
        assert counts.sum(1).tolist() == [2 * 24 * model.config.num_experts_per_tok] * len(loads.mixtures)
        first = counts if first is None else first
        loads.move_biases(counts, 0.002)
    busiest = [(x.amax(1) / x.mean(1)).amax().item() for x in (first, counts)]
    assert busiest[1] < 1.3 < busiest[0]
    before = [mixture.bias.clone() for mixture in loads.mixtures]
    loads.move_biases(torch.tensor([[3.0, 1.0, 2.0, 2.0]]).repeat(len(before), 2)[:, : counts.shape[1]], 0.25)
    moved = [mixture.bias - x for mixture, x in zip(loads.mixtures, before, strict=True)]
    for x in moved:
        torch.testing.assert_close(x[:4], torch.tensor([-0.25, 0.25, 0.0, 0.0]).to(x))
    with torch.no_grad():
        model.eval()(tokens)
    assert loads.take([]) is None


class GradientCheckpointed(nn.Module):
    """A module that is recomputed in the backward."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(self.module, x, use_reentrant=False)


def test_the_loads_are_metrics_and_a_picture(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    job = Job(tmp_path)
    zoo.config("glm4_moe", vocab_size=4096).save_pretrained(tmp_path)
    arguments = ("--model.config=config.json", "--training.steps=2", "--checkpoint.no-enable")
    assert job.run(*arguments, "--metrics.enable_tensorboard", "--metrics.log_freq=1") == 0, job.err
    (file,) = (tmp_path / "out").rglob("events.out.*")
    events = EventAccumulator(str(file)).Reload()
    assert [image.step for image in events.Images("experts/load")] == [1, 2]
    assert all(image.height == 1 and image.width == 8 for image in events.Images("experts/load"))
    figures = {
        name: [x.value for x in events.Scalars(f"experts/{name}")] for name in ("idle", "largest_bias")
    }
    assert figures["largest_bias"] == pytest.approx([1e-3, 2e-3], rel=1e-4)
    assert all(0 <= idle < 8 for idle in figures["idle"])


def test_a_coefficient_without_biases_is_refused(tmp_path):
    job = Job(tmp_path)
    zoo.config("mixtral", **BALANCED).save_pretrained(tmp_path)
    assert job.run("--model.config=config.json", "--optimizer.load_balance_coeff=0.01") == 2
    assert "optimizer.load_balance_coeff = 0.01: no router of" in job.err


def test_a_model_without_load_balancing_loss_refuses_the_option():
    config = modeling.load_config("deepseek_v3", "debug", output_router_logits=True)
    model = LanguageModel(config)
    model.lm.to_empty(device="cpu")
    model.initialize()
    with pytest.raises(ModelError, match=r"output_router_logits = True, .*V3ForCausalLM"):
        model(torch.zeros(1, 8, dtype=torch.int64))


def test_only_the_aux_loss_of_a_model_is_added():
    model, balance = nn.Identity(), torch.tensor(3.0)
    model.config = SimpleNamespace(router_aux_loss_coef=0.5)
    assert added_loss(model, SimpleNamespace(logits=None, loss=None)) is None
    assert added_loss(model, SimpleNamespace(aux_loss=balance)) == 1.5
    with pytest.raises(ModelError, match="Identity returns z_loss"):
        added_loss(model, SimpleNamespace(aux_loss=balance, z_loss=balance))
    model.config = None
    with pytest.raises(ModelError, match="no weight for it: set router_aux_loss_coef"):
        added_loss(model, SimpleNamespace(aux_loss=balance))


class Named(NamedTuple):
    logits: torch.Tensor
    aux_loss: torch.Tensor


@dataclass(slots=True)
class Slotted:
    logits: torch.Tensor
    aux_loss: torch.Tensor


class Computed:
    """An output class whose aux_loss is a property."""

    def __init__(self, logits, balance):
        self.logits, self._balance = logits, balance

    @property
    def aux_loss(self):
        return self._balance


def of_transformers(logits, balance):
    """Return an output of transformers with aux_loss set as an attribute, not as a key."""
    output = CausalLMOutputWithPast(logits=logits)
    output.aux_loss = balance
    return output


@pytest.mark.parametrize(
    "kind",
    [
        Named,
        of_transformers,
        Slotted,
        Computed,
        lambda logits, balance: {"logits": logits, "aux_loss": balance},
    ],
)
def test_aux_loss_is_read_from_any_kind_of_output(kind):
    model = nn.Identity()
    model.config = SimpleNamespace(router_aux_loss_coef=0.5)
    assert added_loss(model, kind(torch.zeros(2, 3, 5), torch.tensor(3.0))) == 1.5


def test_a_loss_without_a_name_is_refused():
    logits, balance = torch.zeros(2, 3, 5), torch.tensor(3.0)
    for output in ((logits, balance), [logits, None, balance]):
        with pytest.raises(ModelError, match=r"Identity returns a plain .* a scalar after its logits"):
            added_loss(nn.Identity(), output)
    assert added_loss(nn.Identity(), (logits, None, logits)) is None
    assert added_loss(nn.Identity(), logits) is None


@pytest.mark.parametrize(
    ("name", "fields", "expected"),
    [("mixtral", {}, True), ("mixtral", {"output_router_logits": True}, False), ("qwen3_next", {}, False)],
)
def test_whether_a_block_is_one_graph(name, fields, expected):
    """Recorded router logits break a graph, and so do FLA's kernels, which transformers calls if FLA is installed."""
    assert one_graph_a_block(modeling.build(modeling.load_config(name, "debug", **fields))) is expected


def test_compiled_blocks_record_router_logits():
    config = modeling.load_config(
        "mixtral", "debug", hidden_size=32, num_hidden_layers=2, output_router_logits=True
    )
    model = build_real(config, dtype=torch.float32)
    tokens = torch.arange(32).view(2, 16)
    balance = model(tokens).aux_loss
    with pytest.raises(ParallelError, match=r"fullgraph = true.* output_router_logits = true"):
        apply_compile(model, Compile(enable=True, backend="eager", fullgraph=True), None)
    apply_compile(model, Compile(enable=True, backend="eager"), None)
    assert model(tokens).aux_loss.equal(balance)
