"""A language model that transformers does not know: linear attention whose heads forget, each at a rate of its own."""

import torch
from torch import nn
from torch.nn import functional as F


class Mixer(nn.Module):
    """Queries, keys and values in one projection; `decay` has one number for each head, `norm` one weight for all."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.num_heads, self.size = heads, width // heads
        self.qkv_proj = nn.Linear(width, 3 * width, bias=False)
        self.decay = nn.Parameter(torch.linspace(-4, 0, heads))
        self.norm = nn.RMSNorm(self.size)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (-1, self.size)) for part in self.qkv_proj(x).chunk(3, -1))
        steps = torch.arange(x.shape[1], device=x.device)
        apart = (steps[:, None] - steps)[..., None]
        kept = (-self.decay.exp() * apart.clamp(min=0)).exp() * (apart >= 0)
        o = torch.einsum("bihd,bjhd,ijh,bjhe->bihe", q, k, kept.to(q.dtype), v)
        return self.o_proj(self.norm(o).flatten(2))


class MLP(nn.Module):
    """Four times as wide, without a gate."""

    def __init__(self, width: int):
        super().__init__()
        self.fc_in, self.fc_out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc_out(F.gelu(self.fc_in(x)))


class Block(nn.Module):
    """A mixer and an MLP, each behind a norm."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.mixer_norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.mixer, self.mlp = Mixer(width, heads), MLP(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.mixer(self.mixer_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class MyModel(nn.Module):
    """Token ids [batch, sequence] in, logits [batch, sequence, vocabulary] out."""

    model_type = "my_model"

    def __init__(self, vocabulary: int = 4096, width: int = 128, heads: int = 8, layers: int = 4):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))
