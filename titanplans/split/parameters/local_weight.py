"""The local tensor that reading a parameter of a split module returns; its flags and hooks are the parameter's.

Results computed from it are plain tensors. An attribute that a user sets (`requires_grad`, `grad`, hooks) goes to the
parameter itself, the DTensor that optimizers and state dicts hold: on the local tensor, which is made anew at each
reading, it would be lost.
"""

from typing import Any

import torch

from titanplans.errors import PlanError
from titanplans.torch_private.dispatch import disabled_torch_function


def _refusing(name: str) -> Any:
    def draw(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if _is_whole(self):
            return getattr(torch.Tensor, name)(self, *args, **kwargs)
        raise PlanError(
            f"weight.{name}() on a split model would draw this rank's part by itself, equal to or unlike the others': call "
            "titanplans.modeling.initialize(model, seed=0), or draw before the split, or load whole tensors by "
            "model.load_state_dict"
        )

    return draw


class LocalPart(torch.Tensor):
    """This rank's part of a parameter. It computes as a plain tensor, without the cost of a `__torch_function__`.

    It refuses random fills, such as those of `torch.nn.init`: with one seed all ranks would have equal heads, with
    different seeds unequal replicas.
    """

    __torch_function__ = disabled_torch_function  # pyrefly: ignore[bad-override]
    parameter: torch.Tensor
    """The DTensor."""

    normal_, log_normal_, uniform_, random_ = map(
        _refusing, ("normal_", "log_normal_", "uniform_", "random_")
    )
    bernoulli_, exponential_, geometric_, cauchy_ = map(
        _refusing, ("bernoulli_", "exponential_", "geometric_", "cauchy_")
    )

    def new_empty(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As torch's, a plain tensor, but for `normal_`: `torch.nn.init.orthogonal_` draws into one, and copies it."""
        made = super().new_empty(*args, **kwargs)
        if not _is_whole(self):
            made.normal_ = self.normal_  # type: ignore[method-assign]
        return made


class LocalWeight(LocalPart):
    """What `module.weight` returns."""

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        return self.parameter.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.parameter.requires_grad = value

    def requires_grad_(self, mode: bool = True) -> "LocalWeight":
        self.parameter.requires_grad_(mode)
        return self

    @property
    def grad(self) -> torch.Tensor | None:  # type: ignore[override]
        return self.parameter.grad

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        self.parameter.grad = value

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        part: Any = self.detach()
        part.__class__ = LocalPart
        part.parameter = self.parameter
        return part

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        raise PlanError(
            "weight.data = ... on a split module would replace nothing but a view of this rank's part: write into it, "
            "weight.data.copy_(part), or load whole tensors by model.load_state_dict"
        )

    def register_hook(self, hook: Any) -> Any:
        return self.parameter.register_hook(hook)

    def register_post_accumulate_grad_hook(self, hook: Any) -> Any:
        return self.parameter.register_post_accumulate_grad_hook(hook)

    def retain_grad(self) -> None:
        """Do nothing, as on any parameter: it keeps its gradient."""


def _is_whole(part: Any) -> bool:
    """Whether the ranks that share the parameter are one."""
    mesh = getattr(
        part.parameter, "device_mesh", None
    )  # a plain one is of context parallelism, by DDP or FSDP2
    return mesh is not None and mesh.size() == 1


def as_weight(local: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Turn `local`, this rank's part of `parameter` but not the DTensor's own tensor, into a `LocalWeight`, in place.

    A traced tensor or another subclass of Tensor (fake tensors, float8) is returned as it is.
    """
    if type(local) is not torch.Tensor or torch.compiler.is_compiling():
        return local
    weight: Any = local
    weight.__class__ = LocalWeight  # no operation, so autograd records nothing
    weight.parameter = parameter
    return weight
