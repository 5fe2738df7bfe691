"""`generate` of a split model: transformers' own, with full logits and the same random draws on every rank."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from titanplans.split.cache import cache_argument
from titanplans.split.state import border_of_model, specialise, subclass


def let_generate(model: nn.Module) -> None:
    """Let `generate` of the split `model`, if it has one, return the same tokens on every rank."""
    if callable(getattr(model, "generate", None)):
        specialise(model, _generating(type(model)))


@functools.cache
def _generating(cls: type[nn.Module]) -> type[nn.Module]:
    original: Callable[..., Any] = cls.generate  # pyrefly: ignore[missing-attribute]
    prepare = getattr(cls, "prepare_inputs_for_generation", None)

    @functools.wraps(original)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        border = border_of_model(self)
        assert border is not None
        # transformers takes the logits as one plain tensor, so the head gathers them, also under loss parallelism.
        before, border.stream.gathers_logits = border.stream.gathers_logits, True
        try:
            # transformers samples with torch's default generator.
            with _generator_of_first_rank(border.meshes.tp_cp):
                return original(self, *args, **kwargs)
        finally:
            border.stream.gathers_logits = before

    if prepare is None:
        return subclass(cls, {"generate": generate}, "generating")  # a user's class

    # Since 5.24 transformers passes the cache as `cache`. FLA 0.6's forwards take `past_key_values` and ignore other
    # keywords, so they would generate each token from the previous one alone.
    def rename_cache(self: Any, *args: Any, **kwargs: Any) -> Any:
        inputs = prepare(self, *args, **kwargs)
        if "cache" in inputs and (name := cache_argument(self)) is not None:
            inputs[name] = inputs.pop("cache")
        return inputs

    members = {"generate": generate, "prepare_inputs_for_generation": rename_cache}
    return subclass(cls, members, "generating")


@contextmanager
def _generator_of_first_rank(mesh: DeviceMesh) -> Iterator[None]:
    """Let torch's default generator draw the first rank's numbers on every rank of the 1-D `mesh`.

    On exit, each rank whose generator was in another state than the first rank's gets its earlier state back. On all other
    ranks the generator stays where the draws have left it.
    """
    device = torch.device(mesh.device_type)
    generator = torch.cuda if device.type == "cuda" else torch
    before = generator.get_rng_state()
    first = before.to(device, copy=True)
    dist.broadcast(first, group=mesh.get_group(), group_src=0)
    first = first.cpu()
    generator.set_rng_state(first)
    try:
        yield
    finally:
        if not torch.equal(before, first):
            generator.set_rng_state(before)
