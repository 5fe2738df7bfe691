"""What operators cost, against numbers that follow from the sizes of their tensors."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from titanplans.observe.work import work_of
from titanplans.torch_private.dispatch import FakeTensorMode, TorchDispatchMode


class Works(TorchDispatchMode):
    """Lists the work of all operators in its body."""

    def __init__(self):
        super().__init__()
        self.works = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if (work := work_of(func, args, kwargs or {}, result)) is not None:
            self.works.append(work)
        return result


def works_of(function):
    with Works() as mode:
        function()
    return mode.works


@pytest.mark.parametrize("context", [torch.enable_grad, FakeTensorMode], ids=["real", "fake"])
def test_product(context):
    with context():
        a, b = torch.zeros(4, 8, dtype=torch.bfloat16), torch.zeros(8, 16, dtype=torch.bfloat16)
        (work,) = works_of(lambda: a @ b)
    assert (work.operator, work.flops, work.dtype) == ("aten::mm", 2 * 4 * 8 * 16, torch.bfloat16)
    assert work.bytes == 2 * (4 * 8 + 8 * 16 + 4 * 16)


def test_products_of_a_step():
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4, bias=False))
    counter = FlopCounterMode(display=False)
    with counter:
        works = works_of(lambda: model(torch.zeros(3, 8)).sum().backward())
    assert sum(work.flops for work in works) == counter.get_total_flops()


def test_products_of_experts_count_as_those_of_their_tokens():
    tokens, experts, width, inner = 12, 3, 16, 8
    x = torch.zeros(tokens, width, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.zeros(experts, width, inner, dtype=torch.bfloat16, requires_grad=True)
    ends = torch.tensor([4, 4, 12], dtype=torch.int32)
    gradient = torch.ones(tokens, inner, dtype=torch.bfloat16)
    works = works_of(lambda: torch._grouped_mm(x, weight, offs=ends).backward(gradient))
    # The forward, the gradient of the tokens and that of the weights multiply as often.
    assert [work.flops for work in works if "_grouped_mm" in work.operator] == [
        2 * tokens * width * inner
    ] * 3
    transposed = weight.detach().transpose(1, 2)
    works = works_of(lambda: torch._grouped_mm(transposed, x.detach().T, offs=ends))
    assert [work.flops for work in works if "_grouped_mm" in work.operator] == [2 * tokens * width * inner]


@pytest.mark.parametrize(("is_causal", "fraction"), [(False, 1), (True, 2)])
def test_attention(is_causal, fraction):
    q, k, v = (torch.zeros(2, 3, 32, 8, requires_grad=True) for _ in range(3))
    works = works_of(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=is_causal).sum().backward())
    forward, backward = (work.flops for work in works if work.is_attention)
    assert forward == 2 * 2 * 3 * 32 * 32 * (8 + 8) // fraction
    assert backward == forward * 5 // 2


def test_bytes_of_elementwise_operators():
    x = torch.zeros(10)
    assert [work.bytes for work in works_of(lambda: x + x)] == [3 * 40]
    assert [work.bytes for work in works_of(lambda: x.add_(1))] == [2 * 40]
    assert [work.bytes for work in works_of(lambda: torch._foreach_add_([x, x], 1))] == [4 * 40]
    # one number, read once, and ten numbers written
    assert [work.bytes for work in works_of(lambda: torch.zeros(1).expand(10) + 1)][-1] == 4 + 40


def test_a_lookup_reads_only_its_rows():
    table, ids = torch.zeros(1000, 8), torch.tensor([3, 5])
    assert [work.bytes for work in works_of(lambda: F.embedding(ids, table))] == [2 * 2 * 8 * 4]


def test_views_and_empty_tensors_cost_nothing():
    x = torch.zeros(4, 6)
    assert works_of(lambda: (x.t(), x.view(24), x[1:], torch.empty(3), x.detach())) == []
