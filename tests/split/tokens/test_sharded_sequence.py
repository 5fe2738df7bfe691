"""Every torch function that a subclass may override gives the full sequence's result on a ShardedSequence, or is refused."""

import inspect
import itertools

import pytest
import torch
from torch.overrides import get_overridable_functions, get_testing_overrides, resolve_name
from torch.utils._pytree import tree_leaves

from titanplans import PlanError
from titanplans.split.local_tokens import GatherPermission, LocalTokens
from titanplans.split.tokens import sharded_sequence as rules
from titanplans.split.tokens.sharded_sequence import ShardedSequence, sharded_sequence

LENGTH, RANKS, WIDTH = 6, 2, 4
GRANTED = GatherPermission(True, "attn_region(may_gather=True)", "layers.0.attn")
NOT_GRANTED = GRANTED._replace(granted=False)
WHOLE = torch.linspace(-0.9, 1.3, 2 * LENGTH * WIDTH, dtype=torch.float64).sin().view(2, LENGTH, WIDTH)
LEFT_OUT = """
    empty_like new_empty __reduce_ex__ __reduce__ __deepcopy__ __repr__ __format__ __hash__ share_memory_ storage
    untyped_storage typed_storage data_ptr const_data_ptr _cdata module_load retain_grad grad_fn
""".split()  # noqa: SIM905
"""Functions that return memory or an address, or do not depend on values of a tensor."""


class LastOfTwoRanks(LocalTokens):
    """The last of two ranks; it has the values of the other rank, so that gathers need no collective."""

    def __init__(self, full_sequence):
        self.dim, self.rank, self.group, self.everyones = 1, RANKS - 1, ("", RANKS), full_sequence

    def gather(self, x):
        return Gathered.apply(x, self)

    def sum(self, x):
        return self.take_local(x)


class Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, tokens):
        ctx.tokens = tokens
        return tokens.everyones.clone()

    @staticmethod
    def backward(ctx, grad):
        return ctx.tokens.take_local(grad), None


def local_part(x):
    return LastOfTwoRanks(None).take_local(x)


def vector():
    return torch.linspace(0.5, 2, WIDTH, dtype=torch.float64)


def arguments(dummy):
    """Yield arguments, after the sequence, with which a function may be called."""
    names = [name for name, p in inspect.signature(dummy).parameters.items() if p.default is p.empty][1:]
    named = {"dim": 1, "dim0": 0, "dim1": 1, "p": 2, "dtype": torch.float32, "repeats": 2}
    if all(name in named for name in names):
        yield tuple(named[name] for name in names)
    yield ()
    yield (vector(),)
    yield (2,)
    yield (1, 2)
    yield (WHOLE.cos(),)
    yield (WHOLE.cos(), WHOLE.sin())


def call(function, make, further):
    """Return the sequence after the call, the result of `function` (None if it failed) and its error (None if not)."""
    torch.manual_seed(0)
    x = make()
    try:
        return x, function(x, *further), None
    except (
        AssertionError,
        RuntimeError,
        TypeError,
        ValueError,
        AttributeError,
        LookupError,
        BufferError,
    ) as error:
        return x, None, error


def full_sequence():
    return WHOLE.clone().requires_grad_() * 1  # not a leaf


def plain():
    return WHOLE.clone()


def local_tokens(x):
    """Return this rank's tokens of a ShardedSequence, and any other result unchanged."""
    return x.shard if isinstance(x, ShardedSequence) else x


def differs(actual, expected):
    if isinstance(expected, torch.Tensor):
        if isinstance(actual, ShardedSequence):
            actual, expected = actual.shard, local_part(expected)
        if actual.shape != expected.shape or actual.dtype != expected.dtype:
            return True
        actual, expected = (
            x.detach().to_dense() if x.layout != torch.strided else x.detach() for x in (actual, expected)
        )
        return not torch.allclose(actual.double(), expected.double(), equal_nan=True)
    return isinstance(expected, int | float | bool | str | torch.Size | torch.dtype) and actual != expected


@pytest.mark.parametrize("permission", [GRANTED, NOT_GRANTED], ids=["granted", "not granted"])
@pytest.mark.parametrize("gradient", [True, False])
def test_every_function_gives_the_result_of_the_full_sequence(permission, gradient):
    """A function that needs other ranks' tokens is refused unless the plan permits the gather."""
    functions = list(itertools.chain.from_iterable(get_overridable_functions().values()))
    dummies, wrong, ran = get_testing_overrides(), [], set()
    make = full_sequence if gradient else plain

    def sharded():
        x = make()
        shard = local_part(x.detach()).clone().requires_grad_(gradient)
        return sharded_sequence(shard, LastOfTwoRanks(x.detach()), permission)

    for function in functions:
        name = resolve_name(function) or function.__name__
        if rules._name(function) in LEFT_OUT or function not in dummies or "__set__" in name:
            continue
        for further in arguments(dummies[function]):
            x, expected, error = call(function, make, further)
            if error is not None:
                continue
            ran.add(name)
            y, actual, failed = call(function, sharded, further)
            if isinstance(failed, PlanError):
                break
            if failed is not None:
                wrong.append(f"{name}{further}: {failed!r}"[:200])
                break
            pairs = list(zip(tree_leaves(actual), tree_leaves(expected), strict=False))
            if any(differs(a, b) for a, b in pairs) or differs(y, x):
                wrong.append(f"{name}{tuple(r.shape if isinstance(r, torch.Tensor) else r for r in further)}")
                break
            floats = [
                b
                for _, b in pairs
                if isinstance(b, torch.Tensor) and b.requires_grad and b.layout == torch.strided
            ]
            floats = [b for b in floats if b.is_floating_point()]
            if gradient and floats and not x._version:
                a = next(a for a, b in pairs if b is floats[0])
                weight = floats[0].detach().cos()
                try:
                    (at_x,) = torch.autograd.grad((floats[0] * weight).sum(), x, allow_unused=True)
                except RuntimeError:  # the function has no derivative
                    break
                sums = a.shard * local_part(weight) if isinstance(a, ShardedSequence) else a * weight
                (at_shard,) = torch.autograd.grad(sums.sum(), y.shard, allow_unused=True)
                if (at_x is None) != (at_shard is None) or (
                    at_x is not None and differs(at_shard, local_part(at_x))
                ):
                    wrong.append(f"{name}: its gradient")
            break
    assert not wrong, "\n".join(wrong)
    assert len(ran) > 500, len(ran)


def test_the_tables_name_functions_of_torch():
    holders = (torch.Tensor, torch, torch.nn.functional)
    table = rules.OF_TOKENS | rules.LIKE_ANOTHER
    assert not [name for name in table if not any(hasattr(holder, name) for holder in holders)]


def test_without_a_permission_casts_scales_and_views_work():
    x = sharded_sequence(local_part(WHOLE), LastOfTwoRanks(WHOLE), NOT_GRANTED)
    for same in (x.float(), x * 2, 2 * x / torch.tensor(3.0), x.view(x.shape), x[:, :], x.contiguous()):
        assert isinstance(same, ShardedSequence)
        assert same.shape == WHOLE.shape
    assert (x.size(1), x.new_zeros(2).shape, torch.zeros_like(x).shape) == (LENGTH, (2,), WHOLE.shape)
    for needs in (lambda: x + x, lambda: x[:, 1:], lambda: x.sum(), lambda: x.clone().add_(1)):
        with pytest.raises(
            PlanError,
            match=r"in test_sharded_sequence.py, line \d+, needs all tokens of the hidden states at layers.0.attn, .*"
            r"give layers.0.attn the style attn_region\(may_gather=True\)",
        ):
            needs()
    assert not x.gathered


def test_a_tensor_is_not_added_in_place_to_a_partial_sum():
    """The code is refused, because the sum would contain only this rank's tokens of the added tensor."""
    doubled, x = (
        sharded_sequence(local_part(WHOLE), LastOfTwoRanks(WHOLE), GRANTED, partial=True) for _ in range(2)
    )
    doubled *= 2
    assert torch.equal(doubled.shard, local_part(WHOLE) * 2)
    with pytest.raises(PlanError, match=r"changes a partial sum in place.* x = x \+ y"):
        x += torch.ones_like(WHOLE)


def test_the_sequence_may_be_given_by_keyword():
    x = sharded_sequence(local_part(WHOLE), LastOfTwoRanks(WHOLE), GRANTED)
    results = (
        torch.reshape(input=x, shape=(2, -1)),
        torch.nn.functional.dropout(input=x, p=0.0),
        torch.where(condition=WHOLE > 0, input=x, other=torch.zeros(())),
    )
    for actual, expected in zip(results, (WHOLE.reshape(2, -1), WHOLE, WHOLE.clamp(min=0)), strict=True):
        assert torch.equal(actual.to_full() if isinstance(actual, ShardedSequence) else actual, expected)
