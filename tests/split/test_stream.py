"""Under context parallelism no hidden states of the full sequence are allocated, on fake tensors too."""

from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests import zoo
from titanplans import apply_plan
from titanplans.loss import cross_entropy
from titanplans.proof.ranks.fake import fake_ranks
from titanplans.split.local_tokens import GatherPermission, LocalTokens
from titanplans.split.tokens.sharded_sequence import ShardedSequence, sharded_sequence

LENGTH, CONTEXT = 24, 2

pytestmark = pytest.mark.usefixtures("cpu_kernels")

GRANTED = GatherPermission(True, "")


class AllocatedShapes(TorchDispatchMode):
    """Collects the shapes of tensors that own memory for all of their elements."""

    def __init__(self):
        super().__init__()
        self.shapes = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not all(issubclass(kind, FakeTensor | nn.Parameter) or kind is torch.Tensor for kind in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            is_real = isinstance(tensor, FakeTensor) and tensor.device.type != "meta"
            if is_real and tensor.untyped_storage().nbytes() >= tensor.nbytes:
                self.shapes.add(tuple(tensor.shape))
        return result


@contextmanager
def split(name, **sizes):
    with fake_ranks(CONTEXT, cp=CONTEXT) as mesh:
        model = zoo.build(name, dtype=torch.float32, **sizes)
        apply_plan(model, mesh)
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield model.train()


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize(("name", "sizes"), [("llama", {"hidden_size": 112}), ("gla", {})])
def test_no_hidden_states_of_all_tokens_are_allocated(name, sizes, recomputed):
    with split(name, **sizes) as model:  # hidden_size 112 is no other tensor's width
        if recomputed:  # recomputation makes the first input require a gradient
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        ids = torch.zeros(1, LENGTH, dtype=torch.long)
        for _ in range(2):
            with AllocatedShapes() as allocated:
                logits = model(input_ids=ids, use_cache=False).logits
                cross_entropy(logits, ids, LENGTH).backward()
    config = model.config
    assert (1, LENGTH // CONTEXT, config.hidden_size) in allocated.shapes
    widths = {config.hidden_size, config.intermediate_size, config.vocab_size}
    full = {shape for shape in allocated.shapes if LENGTH in shape and shape[-1] in widths}
    assert not full


def test_a_sharded_sequence_of_fake_tensors_has_the_full_shape():
    with fake_ranks(CONTEXT, cp=CONTEXT) as mesh, FakeTensorMode():
        tokens = LocalTokens(mesh["cp"], 1)
        shard = torch.empty(1, LENGTH // CONTEXT, 8, requires_grad=True)
        sequence = sharded_sequence(shard, tokens, GRANTED)
        assert isinstance(sequence, ShardedSequence)
        assert sequence.shape == (1, LENGTH, 8)
        assert (sequence * 2).shard.shape == shard.shape
        assert not sequence.gathered
        assert sequence.to_full().shape == sequence.shape
        sequence.to_full().sum().backward()
        assert shard.grad.shape == shard.shape


def test_requires_grad_of_a_sharded_sequence_sets_its_shard():
    with fake_ranks(CONTEXT, cp=CONTEXT) as mesh:
        tokens = LocalTokens(mesh["cp"], 1)
        sequence = sharded_sequence(torch.ones(1, LENGTH // CONTEXT, 8), tokens, GRANTED)
        assert sequence.requires_grad_() is sequence
        assert not sequence.gathered, "it was gathered"
        sequence.shard.sum().backward()
        assert sequence.requires_grad
        assert sequence.shard.grad.equal(torch.ones_like(sequence.shard))


class Doubled(torch.autograd.Function):
    """Like FLA's `Rwkv7FusedAddcmul`: its backward writes the gradient into the saved tensor."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x.contiguous())
        return 2 * x.contiguous()

    @staticmethod
    def backward(ctx, grad):
        (saved,) = ctx.saved_tensors
        return torch.mul(grad, 2, out=saved)


def test_an_autograd_function_saves_plain_tensors():
    with fake_ranks(CONTEXT, cp=CONTEXT) as mesh:
        tokens = LocalTokens(mesh["cp"], 1)
        shard = torch.ones(1, LENGTH // CONTEXT, 8, requires_grad=True)
        doubled = Doubled.apply(sharded_sequence(shard, tokens, GRANTED, partial=True))
        assert type(doubled) is torch.Tensor, "made of tokens whose graph the function has not"
        doubled.sum().backward()
        assert shard.grad.equal(torch.full_like(shard, 2))
