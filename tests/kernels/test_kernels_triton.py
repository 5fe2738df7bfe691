"""FLA's own Triton kernels, run by Triton's interpreter, as the oracle for the functions that replace them.

The oracle needs a process of its own (`TRITON_INTERPRET` is read when triton is imported): this file, run as
`TRITON_INTERPRET=1 python tests/models/test_kernels_triton.py results.pt`, computes `results()` with the kernels; under
pytest it computes them with `titanplans.kernels` installed. chunk_gla and the convolution's cache are absent: their
kernels trip over the interpreter.
"""

import os
import subprocess
import sys

import torch
import torch.nn.functional as F


def results() -> dict[str, list[torch.Tensor]]:
    """Name -> outputs and gradients, in float32."""
    from fla.models import GLAConfig, GLAForCausalLM
    from fla.modules import FusedRMSNormGated, GroupNorm, L2Norm, RotaryEmbedding, ShortConvolution
    from fla.modules.activations import logsigmoid, powglu
    from fla.ops.gla import fused_recurrent_gla

    def run(function, *shapes, seed=0):
        rng = torch.Generator().manual_seed(seed)
        leaves = [torch.randn(shape, generator=rng).requires_grad_() for shape in shapes]
        outputs = function(*leaves)
        outputs = [x for x in (outputs if isinstance(outputs, tuple) else (outputs,)) if x is not None]
        loss = sum((x * torch.linspace(-1, 2, x.numel()).view_as(x)).sum() for x in outputs)
        return [x.detach() for x in (*outputs, *torch.autograd.grad(loss, leaves))]

    def without_oldest(outputs):
        """The kernel passes no gradient through the oldest input of the cache, which no later token looks at."""
        y, cache = outputs
        return y, cache[..., 1:]

    torch.manual_seed(0)
    rows, heads, packed = (1, 20, 16), (1, 20, 2, 16), torch.tensor([0, 3, 20])
    group_norm, gated_norm, conv = (
        GroupNorm(2, 16, bias=True),
        FusedRMSNormGated(16),
        ShortConvolution(16, 4, bias=True),
    )
    rotary = RotaryEmbedding(16)
    out = {
        "group norm": run(lambda x, r: group_norm(x, r, prenorm=True), rows, rows),
        "gated norm": run(lambda x, g: gated_norm(x, g), rows, rows),
        "l2 norm": run(L2Norm(), rows),
        "logsigmoid": run(lambda x: logsigmoid(x, 2.0), rows),
        "powglu": run(powglu, rows, rows),
        "rotary": run(lambda q, k: rotary(q, k, seqlen_offset=2), heads, heads),
        "rotary packed": run(lambda q, k: rotary(q, k, cu_seqlens=packed), heads, heads),
        "conv": run(lambda x: without_oldest(conv(x, output_final_state=True)), rows),
        "conv packed": run(
            lambda x: without_oldest(conv(x, output_final_state=True, cu_seqlens=packed)), rows
        ),
        "gla": run(
            lambda q, k, v, g, s: fused_recurrent_gla(
                q,
                k,
                v,
                F.logsigmoid(g),
                initial_state=s,
                output_final_state=True,
                cu_seqlens=packed,
                state_v_first=True,
            ),
            *[heads] * 4,
            (2, 2, 16, 16),
        ),
    }
    config = GLAConfig(
        hidden_size=32,
        num_hidden_layers=1,
        num_heads=2,
        vocab_size=64,
        intermediate_size=64,
        use_short_conv=True,
    )
    model = GLAForCausalLM(config)
    logits = model(input_ids=torch.arange(40)[None] % 64).logits
    logits.square().mean().backward()
    out["model"] = [logits.detach(), *(p.grad for p in model.parameters())]
    return out


def test_equal_to_the_triton_kernels(tmp_path):
    from titanplans.kernels import install

    path = tmp_path / "results.pt"
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-W", "ignore", __file__, str(path)], env=environment, check=True)
    want = torch.load(path)
    install("cpu")
    got = results()
    assert got.keys() == want.keys()
    for name in want:
        for a, b in zip(got[name], want[name], strict=True):
            # Both round in float32, in a different order.
            assert (a - b).abs().max() <= 1e-5 * max(1e-3, b.abs().max().item()), name


if __name__ == "__main__":
    from triton.runtime.autotuner import Autotuner

    # There is nothing to time in an interpreter: take the first configuration.
    Autotuner.prune_configs = lambda self, kwargs: self.configs[:1]
    torch.save(results(), sys.argv[1])
