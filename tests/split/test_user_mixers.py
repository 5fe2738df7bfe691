"""Mixers of the user under tensor and context parallelism: code between the projections, eager and compiled."""

import itertools
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tests.support.plan_examples import decays, decays_of_rank, with_mixer
from tests.support.process_groups import run
from tests.support.releases import needs_torch_2_13
from tests.support.tiny_model import TinyPlan, changed
from titanplans import Degrees, PlanError, apply_plan, check_plan
from titanplans.parallel import cross_entropy
from titanplans.split.gradients import align_gradients


class Scaled(nn.LayerNorm):
    def forward(self, x, scale):
        return scale * super().forward(x)


class Saved(torch.autograd.Function):
    """Saves its input unchanged."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 2 * grad * x


class Mixer(nn.Module):
    def __init__(self, kind, width=16, heads=4):
        super().__init__()
        self.kind, self.num_heads, self.head_dim = kind, heads, width // heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(width, width) for _ in range(4))
        if kind == "scaled":
            self.norm = Scaled(width)
        elif kind == "buffer":
            self.register_buffer("by_head", decays(heads, None)[:, None, None])

    def forward(self, hidden_states):
        x, kind = hidden_states, self.kind
        batch, length, _ = x.shape
        if kind == "indexer":  # the indexer is called first, without a gradient
            with torch.no_grad():
                q = self.q_proj(x)
        else:
            q = self.q_proj(x)
        k = self.k_proj(self.norm(x, 0.5) if kind == "scaled" else x)
        if kind == "saved":
            x = torch.utils.checkpoint.checkpoint(Saved.apply, x, use_reentrant=False)
        elif kind == "vmapped":
            x = torch.vmap(torch.sin)(x)
        elif kind == "typed":
            x = x * torch.arange(x.shape[-1]).to(x) * torch.ones(1, length, x.shape[-1]).type_as(x)
        v = self.v_proj(x)
        q, k, v = (y.view(batch, length, -1, self.head_dim).transpose(1, 2) for y in (q, k, v))
        steps = torch.arange(length)
        decay = self.by_head if kind == "buffer" else decays(q.shape[1], q.device).to(q)[:, None, None]
        decay = decay * (steps[:, None] - steps)
        mixed = ((q @ k.mT) * decay.exp().tril()) @ v
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))


class Plan(TinyPlan):
    def attn_plan(self, attn):
        plan = {
            **self.attn_input(may_gather=attn.kind in ("saved", "vmapped", "typed")),
            **{f"{name}_proj": self.colwise() for name in "qkv"},
            "o_proj": self.rowwise(),
        }
        of_kind = {"scaled": {"norm": self.replicated_in_region()}, "buffer": {"by_head": self.colwise()}}
        return plan | of_kind.get(attn.kind, {})

    def local_functions(self, attn):
        return {"decays": decays_of_rank}


def gradients(model, call, ids):
    """Train two steps; return logits and gradients of the second."""
    for _ in range(2):
        model.zero_grad()
        logits = call(ids).logits
        cross_entropy(logits, torch.roll(ids, -1, 1), 1).backward()
    align_gradients(model.parameters())
    grads = {name: param.grad for name, param in model.named_parameters()}
    return {"logits": logits.detach()} | {name: grad for name, grad in grads.items() if grad is not None}


def compared(rank, kind, axes, compiled):
    torch.manual_seed(0)
    model, ids = with_mixer(partial(Mixer, kind)).double(), torch.randint(32, (2, 16))
    expected = gradients(model, model, ids)
    state = {name: tensor.clone() for name, tensor in model.named_buffers()}
    apply_plan(model, init_device_mesh("cpu", (2,) * len(axes), mesh_dim_names=axes), plan=Plan)
    assert all(torch.equal(model.state_dict()[name], full) for name, full in state.items())
    call = model
    if compiled == "blocks":
        for block in model.layers:
            block.compile(backend="aot_eager")
    elif compiled == "model":
        call = torch.compile(model, backend="aot_eager")
    actual = gradients(model, call, ids)
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(actual[name].full_tensor(), value, rtol=1e-10, atol=1e-12, msg=name)


KINDS = ("indexer", "scaled", "saved", "vmapped", "typed", "buffer")


@pytest.mark.parametrize(
    ("kind", "axes"), [*itertools.product(KINDS, [("tp",), ("cp",)]), ("buffer", ("cp", "tp"))]
)
def test_code_between_the_projections_of_a_mixer(kind, axes):
    run(partial(compared, kind=kind, axes=axes, compiled=None), 2 ** len(axes))


@pytest.mark.parametrize(
    "axes",
    [
        ("tp",),
        pytest.param(("cp",), marks=needs_torch_2_13("a compiled exchange has wrong gradients before it")),
    ],
)
@pytest.mark.parametrize("compiled", ["blocks", "model"])
@pytest.mark.parametrize("kind", ["plain", "buffer"])
def test_a_function_or_a_buffer_of_the_plan_in_compiled_code(kind, compiled, axes):
    run(partial(compared, kind=kind, axes=axes, compiled=compiled), 2)


def test_a_buffer_with_a_key_is_sharded_or_refused():
    plan = changed(Plan, lambda plan: {"by_head": plan.replicated_in_region()})
    with pytest.raises(PlanError, match=r"'layers.0.attn.by_head' .* names a buffer, .* remove the key"):
        check_plan(with_mixer(partial(Mixer, "buffer")), Degrees(tp=2), plan=plan)
