"""`generate` of a split model: transformers' own, with full logits, and with the same draws on every rank.

transformers reads logits as one plain tensor, and samples with torch's default generator. So while it generates the head
gathers its logits, also under loss parallelism, and all ranks draw from the state of the first one's generator.

Since 5.24 it passes the cache as `cache`. FLA 0.6's forwards take `past_key_values` and ignore other keywords, so they would
generate each token from the one before alone: a split model renames the argument.
"""

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
    """Let `generate` of the split `model`, if it has one, give the same tokens on every rank."""
    if callable(getattr(model, "generate", None)):
        specialise(model, _generating(type(model)))


@functools.cache
def _generating(cls: type[nn.Module]) -> type[nn.Module]:
    theirs: Callable[..., Any] = cls.generate  # pyrefly: ignore[missing-attribute]
    prepare = getattr(cls, "prepare_inputs_for_generation", None)

    @functools.wraps(theirs)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        border = border_of_model(self)
        assert border is not None
        before, border.stream.gathers_logits = border.stream.gathers_logits, True
        try:
            with _draws_of_the_first_rank(border.meshes.sharing):
                return theirs(self, *args, **kwargs)
        finally:
            border.stream.gathers_logits = before

    if prepare is None:
        return subclass(cls, {"generate": generate}, "generating")  # a user's own

    def by_its_name(self: Any, *args: Any, **kwargs: Any) -> Any:
        inputs = prepare(self, *args, **kwargs)
        if "cache" in inputs and (name := cache_argument(self)) is not None:
            inputs[name] = inputs.pop("cache")
        return inputs

    members = {"generate": generate, "prepare_inputs_for_generation": by_its_name}
    return subclass(cls, members, "generating")


@contextmanager
def _draws_of_the_first_rank(mesh: DeviceMesh) -> Iterator[None]:
    """Let torch's default generator draw the same numbers on every rank of the 1-D `mesh` as on the first.

    Afterwards it goes on from there, but on a rank where it was in another state: there it is in that again.
    """
    device = torch.device(mesh.device_type)
    generator = torch.cuda if device.type == "cuda" else torch
    own = generator.get_rng_state()
    first = own.to(device, copy=True)
    dist.broadcast(first, group=mesh.get_group(), group_src=0)
    first = first.cpu()
    generator.set_rng_state(first)
    try:
        yield
    finally:
        if not torch.equal(own, first):
            generator.set_rng_state(own)
