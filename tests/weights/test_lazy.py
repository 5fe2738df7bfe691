"""Functions of lazy tensors return the same values as functions of tensors, for any box, and read only this box."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from titanplans.weights.lazy import LazyTensor


class Source:
    """A tensor that counts the elements that are read."""

    def __init__(self, tensor):
        self.tensor, self.read = tensor, 0

    def lazy(self):
        def fetch(box):
            values = self.tensor[tuple(slice(first, last) for first, last in box)]
            self.read += values.numel()
            return values

        return LazyTensor("x", self.tensor.shape, self.tensor.dtype, fetch)


@st.composite
def programs(draw):
    """Draw the shape and the number of sources, the functions to apply, and a seed."""
    shape = draw(st.lists(st.integers(1, 5), min_size=2, max_size=3))
    count = draw(st.integers(1, 4))
    steps = draw(
        st.lists(st.sampled_from(["stack", "cat", "chunk", "transpose", "reverse", "flatten"]), max_size=4)
    )
    return shape, count, steps, draw(st.integers(0, 2**31))


def apply(tensors, step, choose):
    """Return the tensors that the function named `step` makes of `tensors`."""
    ndim = tensors[0].ndim
    dim = choose(ndim)
    have_same_shape = all(tensor.shape == tensors[0].shape for tensor in tensors)
    if step == "stack" and ndim < 4 and have_same_shape:
        return [torch.stack(tensors, dim=dim)]
    if step == "cat" and have_same_shape:
        return [torch.cat(tensors, dim=dim)]
    if step == "chunk":
        return [chunk.contiguous() for tensor in tensors for chunk in torch.chunk(tensor, 2, dim=dim)]
    if step == "transpose":
        other_dim = choose(ndim)
        return [tensor.transpose(dim, other_dim) for tensor in tensors]
    if step == "flatten":  # a flattened tensor is read in full
        return [tensor.reshape(-1, tensor.shape[-1]) for tensor in tensors]
    return tensors[::-1]


@settings(max_examples=150, deadline=None)
@given(programs())
def test_any_box_equals_that_of_the_tensor(program):
    shape, count, steps, seed = program
    generator = torch.Generator().manual_seed(seed)

    def choose(below):
        return int(torch.randint(0, below, (), generator=generator))

    real = [torch.randn(shape, generator=generator) for _ in range(count)]
    sources = [Source(tensor) for tensor in real]
    lazy = [source.lazy() for source in sources]
    for step in steps:
        state = generator.get_state()
        real = apply(real, step, choose)
        generator.set_state(state)
        lazy = apply(lazy, step, choose)
    for tensor, lazy_tensor in zip(real, lazy, strict=True):
        assert tensor.shape == lazy_tensor.shape
        box = tuple(sorted((choose(size + 1), choose(size + 1))) for size in tensor.shape)
        expected = tensor[tuple(slice(first, last) for first, last in box)]
        before = sum(source.read for source in sources)
        assert torch.equal(lazy_tensor.read(box), expected)
        if "flatten" not in steps:
            assert sum(source.read for source in sources) - before == expected.numel()
        assert torch.equal(torch.empty(tensor.shape).copy_(lazy_tensor), tensor)
