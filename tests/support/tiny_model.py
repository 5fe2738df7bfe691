"""A small language model that belongs to no library, and its plan, written as a user would. Most projections have
biases."""

from types import SimpleNamespace

import torch
from torch import nn

from titanplans import TPPlan, apply_plan


class Config:
    """The fields of a config that plans and trainers use."""

    model_type = "tiny"
    fuse_linear_cross_entropy = False


class Attention(nn.Module):
    def __init__(self, heads=4):
        super().__init__()
        self.num_heads, self.num_kv_heads = heads, heads
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(16, 16, bias=False) for _ in range(3))
        self.o_proj = nn.Linear(16, 16)
        self.q_norm = nn.RMSNorm(16 // heads)

    def forward(self, hidden_states):
        q, k, v = (
            p(hidden_states).unflatten(-1, (-1, 16 // self.num_heads))
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        o = nn.functional.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (self.q_norm(q), k, v)), is_causal=True
        )
        return self.o_proj(o.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(16, 24), nn.Linear(16, 24)
        self.down_proj = nn.Linear(24, 16)

    def forward(self, x):
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn_norm, self.mlp_norm = nn.RMSNorm(16), nn.RMSNorm(16)
        self.attn, self.mlp = Attention(), MLP()

    def forward(self, x):
        x = x + self.attn(hidden_states=self.attn_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Tiny(nn.Module):
    """A language model that belongs to no library, so that the engine knows only its structure."""

    def __init__(self, tied=False):
        super().__init__()
        self.config = Config()
        self.embed = nn.Embedding(32, 16)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.RMSNorm(16)
        self.lm_head = nn.Linear(16, 32, bias=False)
        if tied:
            self.lm_head.weight = self.embed.weight

    def forward(self, input_ids, labels=None, use_cache=False, logits_to_keep=0):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return SimpleNamespace(logits=self.lm_head(self.norm(x)))


def tiny_of(layers=2):
    """Return a Tiny with this many blocks, and with the same weights each time."""
    torch.manual_seed(0)
    model = Tiny()
    model.layers = nn.ModuleList(Block() for _ in range(layers))
    return model


def split(world, model=None, dtype=torch.float32, **options):
    """Return `model`, by default a Tiny with the same weights each time, split over the ranks of a proof."""
    torch.manual_seed(0)
    model = (Tiny() if model is None else model).to(dtype)
    apply_plan(model, world.mesh, plan=TinyPlan, **{"loss_parallel": False} | options)
    return model


class TinyPlan(TPPlan):
    def attn_plan(self, attn):
        return {
            **self.attn_input(),
            "q_proj": self.colwise(),
            "k_proj": self.colwise(),
            "v_proj": self.colwise(),
            "q_norm": self.replicated_in_region(),
            "o_proj": self.rowwise(),
        }


def changed(plan, attn=None, mlp=None, model=None, **methods):
    """Return a subclass of `plan` with methods or styles replaced; a style of None removes the key.

    `attn`, `mlp` and `model` are functions that take the plan and return styles by key.
    """

    def merged(plan, edits):
        return {key: style for key, style in (plan | edits).items() if style is not None}

    class Changed(plan):
        def attn_plan(self, module):
            return merged(super().attn_plan(module), attn(self) if attn else {})

        def mlp_plan(self, module):
            return merged(super().mlp_plan(module), mlp(self) if mlp else {})

        def model_plan(self, module):
            return merged(super().model_plan(module), model(self) if model else {})

    for name, method in methods.items():
        setattr(Changed, name, method)
    return Changed
