"""In a proof in float64, code that asks for float32 gets float64, also in grouped products."""

import torch

from titanplans.kernels.widen import Widen


def test_float32_is_widened_by_name_and_as_the_default():
    with Widen(torch.float64):
        tensors = [
            torch.zeros(2),
            torch.empty(2, dtype=None),
            torch.ones(2, dtype=torch.float32),
            torch.eye(2),
        ]
        assert {x.dtype for x in tensors} == {torch.float64}
        assert torch.zeros(2, dtype=torch.int64).dtype == torch.int64
        third = torch.arange(2) / 3
        assert third[1].item() == 1 / 3, "a quotient of integers"
        assert torch.where(third > 0, 1.0, 2.0).dtype == torch.float64
        assert torch.ones(2, dtype=torch.bfloat16).float().dtype == torch.float64


def test_experts_in_float64_multiply_their_own_tokens():
    """torch has no kernel for grouped float64 products. The second expert gets no token, and one token gets no expert."""
    generator = torch.Generator().manual_seed(0)
    tokens, weights, gradient = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((6, 4), (3, 4, 5), (6, 5))
    )
    ends, expert = torch.tensor([2, 2, 5], dtype=torch.int32), [0, 0, 2, 2, 2, None]

    def grouped(tokens, weights):
        with Widen(torch.float64):
            return torch._grouped_mm(tokens, weights, offs=ends)

    def one_by_one(tokens, weights):
        zeros = tokens.new_zeros(5)
        return torch.stack([zeros if e is None else tokens[at] @ weights[e] for at, e in enumerate(expert)])

    results = []
    for multiply in (grouped, one_by_one):
        leaves = [tokens.clone().requires_grad_(), weights.clone().requires_grad_()]
        product = multiply(*leaves)
        results.append([product, *torch.autograd.grad(product, leaves, gradient)])
    for grouped_result, expected in zip(*results, strict=True):
        assert torch.allclose(grouped_result, expected)
