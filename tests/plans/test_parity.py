"""FLA's transformer and GLA, with every option that their configs have, equal to the unsharded model."""

import itertools

import pytest
import torch
from simulate import compare
from tiny import Tiny, TinyPlan
from torch import nn

import models.kernels
from plans import TPPlan

SMALL = dict(
    hidden_size=64, num_hidden_layers=1, vocab_size=96, hidden_ratio=4, intermediate_size=48, use_cache=False
)
TRANSFORMER = {
    "plain": {},
    "grouped": dict(num_kv_heads=4),
    "qk_norm": dict(qk_norm=True),
    "biases": dict(qkv_bias=True),
    "window": dict(window_size=7),
    "tied": dict(tie_word_embeddings=True),
    "unfused": dict(fuse_norm=False, fuse_swiglu=False),
    "powlu": dict(hidden_act="powlu"),
    "padding": dict(pad_token_id=5),
    "residual mixing": dict(attnres_block_size=2, num_hidden_layers=2),
}
GLA = {
    "plain": {},
    "grouped": dict(num_kv_heads=4),
    "short convolutions": dict(use_short_conv=True),
    "ungated": dict(use_output_gate=False),
    "other gate": dict(hidden_act="swish", fuse_norm=False),
    "feature map": dict(feature_map="relu"),
    "clamped": dict(clamp_min=-0.3),
    "no affine": dict(elementwise_affine=False),
    "tied": dict(tie_word_embeddings=True),
    "unfused": dict(fuse_norm=False, fuse_swiglu=False),
    "residual mixing": dict(attnres_block_size=2, num_hidden_layers=2),
    "hybrid": dict(
        num_hidden_layers=2,
        attn=dict(layers=[1], num_heads=8, num_kv_heads=4, qkv_bias=True, window_size=None),
    ),
}
CASES = [("transformer", n, o) for n, o in TRANSFORMER.items()] + [("gla", n, o) for n, o in GLA.items()]


@pytest.fixture(autouse=True, scope="module")
def cpu_kernels():
    models.kernels.install("cpu")


def builder(kind: str, options: dict):
    from fla.models import GLAConfig, GLAForCausalLM, TransformerConfig, TransformerForCausalLM

    config_class, model_class = {
        "transformer": (TransformerConfig, TransformerForCausalLM),
        "gla": (GLAConfig, GLAForCausalLM),
    }[kind]
    config = config_class(num_heads=8, **{**SMALL, **options})
    state = {}

    def build():
        torch.manual_seed(0)
        model = model_class(config).double()
        if not state:
            for name, param in model.named_parameters():
                # Far from their initial values, so that a wrong path to the loss can't hide.
                state[name] = torch.randn(param.shape, dtype=torch.float64) * (0.5 if param.ndim > 1 else 0.3)
                if param.ndim > 1:
                    state[name] *= param.shape[-1] ** -0.5
                elif "norm" in name:
                    state[name] += 1
        for name, param in model.named_parameters():
            param.data.copy_(state[name])
        return model

    return build


@pytest.mark.parametrize(("kind", "name", "options"), CASES, ids=[f"{k}-{n}" for k, n, _ in CASES])
def test_equal_to_unsharded(kind, name, options):
    build = builder(kind, options)
    tokens = torch.randint(0, 96, (2, 16), generator=torch.Generator().manual_seed(1))
    many = 4 if "grouped" in name or "hybrid" in name else 8
    switches = list(itertools.product((True, False), repeat=2))
    grid = [(2, *both) for both in switches] + [(many, True, True)]
    for degree, loss_parallel, sequence_parallel in grid:
        result = compare(
            build, tokens, degree, loss_parallel=loss_parallel, sequence_parallel=sequence_parallel
        )
        what = (degree, loss_parallel, sequence_parallel, result)
        assert not result.missing, what
        # float64: sums of at most a few hundred terms, reordered; 1e-11 is 10^5 epsilons, and the
        # least wrong placement (a gradient that is not reduced) is off by more than 1e-2.
        assert result.loss < 1e-13, what
        assert result.gradient < 1e-11, what


@pytest.mark.parametrize("tied", [False, True])
def test_the_form_that_users_write(tied):
    """attn_input with rowwise, biases in every projection, a norm over each head."""

    def build():
        torch.manual_seed(0)
        return Tiny(tied).double()

    tokens = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(1))
    for degree, (loss_parallel, sequence_parallel) in itertools.product(
        (2, 4), itertools.product((True, False), repeat=2)
    ):
        result = compare(
            build,
            tokens,
            degree,
            plan=TinyPlan,
            loss_parallel=loss_parallel,
            sequence_parallel=sequence_parallel,
        )
        assert not result.missing
        assert max(result.loss, result.gradient) < 1e-11, (degree, loss_parallel, sequence_parallel, result)


def test_positions_come_from_the_tokens():
    """A model of transformers counts positions in its embedding's output, which sequence parallelism shards."""
    from transformers import LlamaConfig, LlamaForCausalLM

    class LlamaPlan(TPPlan):
        def attn_plan(self, attn):
            projections = {name: self.colwise() for name in ("q_proj", "k_proj", "v_proj")}
            return {**self.attn_input(), **projections, "o_proj": self.rowwise()}

    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4
    )

    def build():
        torch.manual_seed(0)
        return LlamaForCausalLM(config).double()

    tokens = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(1))
    result = compare(build, tokens, 2, plan=LlamaPlan, sequence_parallel=True)
    assert not result.missing
    # transformers makes its rotary tables in float32, the same for both models.
    assert max(result.loss, result.gradient) < 1e-11, result


class SequenceFirst(nn.Module):
    """Attention over hidden states [sequence, batch, hidden]."""

    def __init__(self):
        super().__init__()
        self.num_heads = 4
        # No bias on the keys: softmax cancels it, so its gradient would be nothing but rounding.
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(16, 16, bias=False) for _ in range(3))
        self.o_proj = nn.Linear(16, 16)

    def forward(self, hidden_states):
        q, k, v = (
            p(hidden_states).unflatten(-1, (-1, 4)).permute(1, 2, 0, 3)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        o = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(o.permute(2, 0, 1, 3).flatten(2))


def test_the_sequence_may_come_first():
    class Plan(TPPlan):
        def attn_plan(self, attn):
            projections = {name: self.colwise() for name in ("q_proj", "k_proj", "v_proj")}
            return {**self.attn_input(), **projections, "o_proj": self.rowwise()}

    def build():
        torch.manual_seed(0)
        model = Tiny()
        for layer in model.layers:
            layer.attn = SequenceFirst()
        return model.double()

    tokens = torch.randint(0, 32, (8, 3), generator=torch.Generator().manual_seed(1))  # 3: not divisible
    result = compare(build, tokens, 2, plan=Plan, sequence_parallel=True, sequence_dim=0)
    assert not result.missing
    assert max(result.loss, result.gradient) < 1e-11, result
