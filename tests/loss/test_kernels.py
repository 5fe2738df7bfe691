"""The Triton kernels of the loss, run by Triton's interpreter, compute what operators of torch compute.

The interpreter needs a new process, because triton reads `TRITON_INTERPRET` at import. On a GPU, `make gpu` runs the kernels
themselves.
"""

import os
import subprocess
import sys

import pytest
import torch

from titanplans.loss.operators import read_by_operators
from titanplans.loss.sharded_logits import IGNORED, Objective, entropy_and_gradient

OBJECTIVES = {
    "plain": Objective(),
    "smoothed": Objective(label_smoothing=0.1),
    "z-loss": Objective(z_loss=1e-2),
    "both": Objective(0.1, 1e-2),
}
# Sums in another order round differently. In bfloat16 a gradient is rounded by up to a relative 2^-9.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 4e-3}


def case(dtype: torch.dtype, width: int = 4099) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits, which have an odd number of rows and columns for two programs, and labels."""
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(5, width + 2, generator=generator, dtype=torch.float64) * 8).to(dtype)[:, :width]
    logits[1, : width // 2] = -torch.inf  # masks all columns of the first program
    return logits, torch.tensor([0, width - 1, IGNORED, width // 3, 4096])


def main() -> None:
    from titanplans.loss import kernels

    for dtype, tolerance in TOLERANCE.items():
        for name, objective in OBJECTIVES.items():
            results = []
            for read in (kernels.read, read_by_operators):
                logits, labels = case(dtype)
                if objective.label_smoothing:
                    logits = logits.clamp_min(-30)  # an infinite logit makes loss and gradient infinite
                results.append(entropy_and_gradient(logits.clone(), labels, None, objective, True, read))
            (loss, gradient), (expected, of_operators) = results
            assert gradient.dtype == dtype
            assert loss.dtype == expected.dtype
            assert torch.allclose(loss, expected, rtol=tolerance), (dtype, name, loss, expected)
            close = torch.allclose(gradient, of_operators, rtol=tolerance, atol=tolerance)
            assert close, (dtype, name, (gradient - of_operators).abs().max())
            assert gradient[0].abs().max() > 0.01
            assert not gradient[2].any()
    # Shards of the vocabulary: one with labels on another rank, and one without columns.
    for width in (7, 0):
        logits, index, mine = torch.randn(2, width), torch.tensor([3, 0]), torch.tensor([width > 0, False])
        for by_kernel, by_operators in zip(
            kernels.read(logits.clone(), mine, index, True)[0],
            read_by_operators(logits.clone(), mine, index, True)[0],
            strict=True,
        ):
            assert torch.allclose(by_kernel, by_operators), (width, by_kernel, by_operators)


def test_kernels_compute_what_operators_compute():
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    ran = subprocess.run(
        [sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize(("logits", "wide"), [("bf16", "fp32"), ("fp32", "fp32"), ("fp64", "fp64")])
def test_kernels_compile_for_a_gpu(logits, wide):
    """This needs no GPU, because Triton includes the assembler."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from titanplans.loss import kernels

    constants = {"COLUMNS": kernels.COLUMNS, "SUM": True}
    integers = dict.fromkeys(("width", "stride"), "i32")
    for kernel in (kernels._statistics, kernels._gradient):
        types = {"logits": f"*{logits}", "at": "*i64"} | integers | dict.fromkeys(constants, "constexpr")
        signature = {name: types.get(name, f"*{wide}") for name in kernel.arg_names}
        constexprs = {name: value for name, value in constants.items() if name in signature}
        source = ASTSource(kernel, signature=signature, constexprs=constexprs)
        assert compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8}).asm["cubin"]


if __name__ == "__main__":
    main()
