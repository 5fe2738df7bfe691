"""Rehearsals of compiled functions: their memory, their kernels, and what is said if they can't be traced."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import masking_utils

from tests import zoo
from tests.support import rehearsals
from titanplans import modeling
from titanplans.config import Compile
from titanplans.errors import ParallelError
from titanplans.foresight import compiled
from titanplans.foresight.forecast import assumptions
from titanplans.foresight.memory import ACTIVATIONS
from titanplans.foresight.rehearsal import WEIGHTS
from titanplans.observe.storages import record_storages
from titanplans.torch_private.dispatch import FakeTensorMode, storage_id

TOKENS, WIDTH = 64, 32
LLAMA = {"options": False, "num_hidden_layers": 6, "hidden_size": 128, "intermediate_size": 256}
LLAMA |= {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32, "vocab_size": 1024}


def forecast(folder, *options):
    return rehearsals.forecast(
        rehearsals.job(folder, "training.seq_len=512", *options), zoo.config("llama", **LLAMA), 2
    )


class Mlp(nn.Module):
    """Gated, with a norm and a residual: three products, and what is between them."""

    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.gate, self.up, self.down = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x):
        h = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))


def rehearsed(module, *inputs, backward=False):
    """Return the record of a forward of `module`, compiled in place, and perhaps of its backward."""
    torch.compiler.reset()
    module.compile(backend=compiled.rehearsed_options(Compile(enable=True)).backend, fullgraph=True)
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        record_storages(module) as record,
        compiled.rehearse_compiled(record),
    ):
        output = module(*inputs)
        if backward:
            output.sum().backward()
        del output
    return record


def saved(run):
    """Return the bytes of each storage that `run` saves for the backward."""
    storages = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        storages[storage_id(tensor)] = storage, storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        output = run()
    sizes = sorted(size for _, size in storages.values())
    del output
    return sizes


@pytest.mark.parametrize("name", ["mlp", "llama"])
def test_what_is_saved_is_what_torch_saves(name, monkeypatch):
    """The blocks run on values, with a backend of torch that has Inductor's decompositions and partitioner; or rehearsed."""

    monkeypatch.setattr(
        masking_utils, "find_packed_sequence_indices", lambda position_ids: None
    )  # it reads values

    inputs = torch.randn(2, TOKENS, WIDTH) if name == "mlp" else torch.zeros(2, TOKENS, dtype=torch.int64)

    def saved_with(backend, mode):
        torch.compiler.reset()
        model = Mlp() if name == "mlp" else modeling.build(zoo.config("llama", **LLAMA))
        for block in [model] if name == "mlp" else model.model.layers:
            block.compile(backend=backend, fullgraph=True)
        with mode:
            model.to_empty(device="cpu")
            with record_storages(model) as record, compiled.rehearse_compiled(record):
                return saved(lambda: model(torch.zeros_like(inputs)))

    expected = saved_with("aot_eager_decomp_partition", nullcontext())
    backend = compiled.rehearsed_options(Compile(enable=True)).backend
    assert saved_with(backend, FakeTensorMode(allow_non_fake_inputs=True)) == expected


def test_kernels_of_a_forward():
    record = rehearsed(Mlp(), torch.randn(TOKENS, WIDTH))
    names = [operation.work.operator for operation in record.operations]
    product, with_sum = "aten::mm", "aten::addmm"  # the last product adds the residual stream
    assert names == [compiled.FUSED, product, product, compiled.FUSED, with_sum]
    norm, gated = (each.work.bytes for each in record.operations if not each.work.flops)
    hidden, per_token = TOKENS * WIDTH * 4, TOKENS * 4
    assert (
        norm == 2 * hidden + WIDTH * 4 + per_token
    )  # reads x and the weight, writes the output and its scale
    assert gated == 3 * hidden  # reads two products, writes theirs


class Chain(nn.Module):
    """No result of the chains is kept, and each product is dropped when it has been read."""

    def forward(self, x, weight):
        x = x.exp().sin().add(1) @ weight
        x = x.exp().sin().add(1) @ weight
        return x.exp().sin().add(1)


def test_results_within_a_kernel_take_no_memory():
    record = rehearsed(Chain(), torch.randn(TOKENS, WIDTH), torch.randn(WIDTH, WIDTH))
    size = TOKENS * WIDTH * 4
    assert [allocation.size for allocation in record.allocations] == [size] * 5
    assert (
        record.peak == 2 * size
    )  # a product's input and its output; a kernel writes into what it reads last


def test_tensors_of_the_compiler_are_not_counted():
    record = rehearsed(Mlp(), torch.randn(TOKENS, WIDTH), backward=True)
    assert record.live == 3 * WIDTH * WIDTH * 4 + WIDTH * 4  # the gradients


def test_what_is_saved_is_dropped_when_the_backward_has_used_it():
    record = rehearsed(Mlp(), torch.randn(TOKENS, WIDTH), backward=True)
    last = max(index for index, event in enumerate(record.events) if not event.is_free)
    freed = {event.allocation for event in record.events[:last] if event.is_free}
    saved_products = [
        index
        for index, allocation in enumerate(record.allocations)
        if allocation.phase == "forward" and allocation.operator.startswith("aten.mm")
    ]
    assert len(saved_products) == 2
    assert freed.issuperset(saved_products)


def test_a_compiled_job_needs_less_and_is_faster(tmp_path):
    eager, of_compiled = (forecast(tmp_path, f"compile.enable={enable}") for enable in ("false", "true"))
    assert of_compiled.seconds < eager.seconds
    assert of_compiled.notes == []
    (eager_memory,), (memory,) = ([rank.memory for rank in each.ranks] for each in (eager, of_compiled))
    assert memory.parts[ACTIVATIONS] < eager_memory.parts[ACTIVATIONS]
    assert memory.parts[WEIGHTS] == eager_memory.parts[WEIGHTS]
    assert memory.live < eager_memory.live


def test_collectives_of_a_compiled_block_are_those_of_an_eager_one(tmp_path):
    """They take as long; compile only orders them in another way."""
    options = ("parallelism.tensor_parallel_degree=2", "loss.fused=false")
    times = [
        rehearsals.forecast(rehearsals.job(tmp_path, *options, each), zoo.config("llama", **LLAMA), 2)
        .ranks[0]
        .time
        for each in ("compile.enable=false", "compile.enable=true")
    ]
    eager, of_compiled = (
        {key: each.parts[key] for key in each.parts if "over 2 GPUs" in key} for each in times
    )
    assert eager
    assert of_compiled == pytest.approx(eager)


def fail(*args):
    raise NotImplementedError("no such operator")


def test_a_job_that_can_not_be_traced_is_estimated_without_compile(tmp_path, monkeypatch):
    eager = forecast(tmp_path, "compile.enable=false")
    monkeypatch.setattr(compiled.CompiledGraph, "__init__", fail)
    result = forecast(tmp_path, "compile.enable=true")
    assert result.seconds == eager.seconds
    assert result.ranks[0].memory.parts == eager.ranks[0].memory.parts
    (note,) = result.notes
    assert "not modelled for this model, because of NotImplementedError: no such operator" in note
    assert "these are the numbers without it" in note
    with pytest.raises(ParallelError, match="without it nothing chooses the activations"):
        forecast(tmp_path, "compile.enable=true", "activation_checkpoint.mode=memory_budget")


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("compile.backend=aot_eager", 'not modelled with compile.backend = "aot_eager"'),
        ("compile.mode=max-autotune", "compile.mode: not modelled"),
        ('compile.components=["model","optimizer"]', "the optimizer's step: not modelled"),
    ],
)
def test_what_is_assumed_of_compile(tmp_path, option, message):
    job = rehearsals.job(tmp_path, "compile.enable=true", option, "optimizer.implementation=foreach")
    assert any(message in each for each in assumptions(job))
    assert rehearsals.forecast(job, zoo.config("llama", **LLAMA), 2).notes == []
