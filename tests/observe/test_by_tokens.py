"""Communication under context parallelism: one all-to-all for each projection of a mixer, and gathers for other code."""

from collections import Counter
from functools import partial

import pytest
import torch

from tests import zoo
from titanplans import Degrees, apply_plan
from titanplans.loss import cross_entropy
from titanplans.observe.communication import count_communication
from titanplans.plan.options import TPOptions
from titanplans.proof.ranks.fake import fake_ranks

BATCH, SEQUENCE, CONTEXT = 2, 20, 2

pytestmark = pytest.mark.usefixtures("cpu_kernels")


def step(model, inputs):
    logits = model(**inputs).logits
    cross_entropy(logits, torch.zeros(logits.shape[:-1], dtype=torch.long), 1).backward()


def count(name, degree=1, **sizes):
    options = TPOptions(Degrees(tp=degree, cp=CONTEXT))
    with fake_ranks(degree * CONTEXT, cp=CONTEXT) as mesh:
        model = zoo.build(name, dtype=torch.float32, **sizes).train()
        applied = apply_plan(model, mesh)
        run = partial(step, model, zoo.inputs(name, batch_size=BATCH, seq_len=SEQUENCE))
        return count_communication(model, applied, run, options)


def issued(communication, direction):
    return Counter(
        (c.operation, c.elements) for part in communication.parts for c in communication.of(part, direction)
    )


def test_a_mixer_exchanges_each_of_its_projections_and_an_mlp_nothing():
    communication = count("llama", num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    assert communication.minimal
    layers, tokens = 2, BATCH * SEQUENCE // CONTEXT  # tokens per rank
    queries, keys = 4 * 8, 2 * 8  # the output has the size of the queries
    expected = {("all_to_all", tokens * queries): 2 * layers, ("all_to_all", tokens * keys): 2 * layers}
    assert issued(communication, "forward") == issued(communication, "backward") == expected
    assert not communication.gathered


def test_shared_heads_are_sent_once_to_each_rank():
    communication = count("llama", num_attention_heads=4, num_key_value_heads=1, head_dim=8)
    assert communication.minimal
    keys = 2 * 8  # one head for each of two ranks
    assert issued(communication, "forward")["all_to_all", BATCH * SEQUENCE // CONTEXT * keys] == 2 * 2


@pytest.mark.parametrize("name", ["llama", "gla", "qwen3_next", "mamba2", "samba"])
@pytest.mark.parametrize("degree", [1, 2])
def test_no_mixer_sends_more_than_it_needs(name, degree):
    communication = count(name, degree)
    assert communication.minimal, communication.lines()
    assert not any(communication.full_sequence_gathers.mixer_of(c) for c in communication.gathered)


@pytest.mark.parametrize(
    ("name", "mixers"),
    [
        ("rwkv7", ["model.layers.0.attn", "model.layers.0.ffn"]),
        ("deepseek_v3", ["model.layers.0.self_attn"]),
    ],
)
def test_gathers_of_code_before_the_projections_are_named(name, mixers):
    communication = count(name)
    assert communication.minimal
    gathered = communication.gathered
    assert {c.operation for c in gathered} == {"all_gather", "reduce_scatter"}
    assert {communication.full_sequence_gathers.mixer_of(c) for c in gathered} >= set(mixers)
    (line,) = [line for line in communication.lines() if all(mixer in line for mixer in mixers)]
    assert "gathers and sums" in line
    assert communication.to_dict()["gathered"]


def test_gradients_of_all_parameters_are_summed():
    communication = count("llama")
    assert set(communication.gradients) == {name for name, _ in zoo.build("llama").named_parameters()}
