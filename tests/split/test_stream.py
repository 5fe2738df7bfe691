"""Where tokens are cut, nothing of the whole sequence's hidden states is made, on fake tensors too."""

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


class Made(TorchDispatchMode):
    """Keeps the shapes of what takes as much memory as it looks."""

    def __init__(self):
        super().__init__()
        self.shapes = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not all(issubclass(kind, FakeTensor | nn.Parameter) or kind is torch.Tensor for kind in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        for made in tree_leaves(result):
            is_real = isinstance(made, FakeTensor) and made.device.type != "meta"
            if is_real and made.untyped_storage().nbytes() >= made.nbytes:
                self.shapes.add(tuple(made.shape))
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
def test_no_hidden_states_of_all_tokens_are_made(name, sizes, recomputed):
    with split(name, **sizes) as model:  # of a width that no other tensor has
        if recomputed:  # whose first input is made to require a gradient
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        ids = torch.zeros(1, LENGTH, dtype=torch.long)
        for _ in range(2):
            with Made() as made:
                logits = model(input_ids=ids, use_cache=False).logits
                cross_entropy(logits, ids, LENGTH).backward()
    config = model.config
    assert (1, LENGTH // CONTEXT, config.hidden_size) in made.shapes
    widths = {config.hidden_size, config.intermediate_size, config.vocab_size}
    whole = {shape for shape in made.shapes if LENGTH in shape and shape[-1] in widths}
    assert not whole


def test_a_fake_tensor_looks_whole():
    with fake_ranks(CONTEXT, cp=CONTEXT) as mesh, FakeTensorMode():
        tokens = LocalTokens(mesh["cp"], 1)
        shard = torch.empty(1, LENGTH // CONTEXT, 8, requires_grad=True)
        whole = sharded_sequence(shard, tokens, GRANTED)
        assert isinstance(whole, ShardedSequence)
        assert whole.shape == (1, LENGTH, 8)
        assert (whole * 2).shard.shape == shard.shape
        assert not whole.gathered
        assert whole.to_full().shape == whole.shape
        whole.to_full().sum().backward()
        assert shard.grad.shape == shard.shape


def test_what_looks_whole_is_made_to_require_a_gradient():
    with fake_ranks(CONTEXT, cp=CONTEXT) as mesh:
        tokens = LocalTokens(mesh["cp"], 1)
        whole = sharded_sequence(torch.ones(1, LENGTH // CONTEXT, 8), tokens, GRANTED)
        assert whole.requires_grad_() is whole
        assert not whole.gathered, "it was gathered"
        whole.shard.sum().backward()
        assert whole.requires_grad
        assert whole.shard.grad.equal(torch.ones_like(whole.shard))


class Doubled(torch.autograd.Function):
    """Like FLA's `Rwkv7FusedAddcmul`: what it saves is where its backward writes the gradient."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x.contiguous())
        return 2 * x.contiguous()

    @staticmethod
    def backward(ctx, grad):
        (saved,) = ctx.saved_tensors
        return torch.mul(grad, 2, out=saved)


def test_an_autograd_function_saves_numbers():
    with fake_ranks(CONTEXT, cp=CONTEXT) as mesh:
        tokens = LocalTokens(mesh["cp"], 1)
        shard = torch.ones(1, LENGTH // CONTEXT, 8, requires_grad=True)
        doubled = Doubled.apply(sharded_sequence(shard, tokens, GRANTED, partial=True))
        assert type(doubled) is torch.Tensor, "made of tokens whose graph the function has not"
        doubled.sum().backward()
        assert shard.grad.equal(torch.full_like(shard, 2))
