"""Checks that run once, in the first forward of a split model, since their facts can't be known before.

All ranks got the same batch; no parameter came after the split; and in the first forward in training mode nothing drew
random numbers. What has replaced parameters since the split, such as torch's `fully_shard`, is known by then. Later
forwards cost nothing: the hooks take themselves away.
"""

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from titanplans.errors import PlanError
from titanplans.split.adapted import ADAPTERS
from titanplans.split.arguments import positional
from titanplans.split.checksum import checksum
from titanplans.split.guards.dropout import REMEDY, WHOLE, draws_alike, dropouts
from titanplans.split.objects import of_all
from titanplans.split.parameters.replaced import parameters_of, retire_replaced
from titanplans.text import class_name
from titanplans.torch_private.dispatch import dispatch_is_watched, tree_leaves
from titanplans.torch_private.fsdp import fsdp_group


def check_first_forward(
    model: nn.Module, base: nn.Module, mesh: DeviceMesh, distributes: bool, *, sum_over_cp: bool
) -> None:
    """Put the checks before and after the first forward of `model`, or of `base` in it, whichever is called.

    Args:
        model: the split model.
        base: the module that holds its blocks, which an adapter's wrapper calls past the model.
        mesh: 1-D, of all ranks that work on the same batch.
        distributes: the parameters are DTensors.
        sum_over_cp: `align_gradients` sums the gradients over the CP ranks, and not FSDP2.
    """
    first = _First(mesh, distributes, sum_over_cp)
    for module in {model: None, base: None}:
        first.parameters[id(module)] = parameters_of(module)
        first.handles += [
            module.register_forward_pre_hook(first.before, prepend=True, with_kwargs=True),
            module.register_forward_hook(first.after),
        ]


class _First:
    """The hooks of the first forwards of one model.

    They also retire parameters that were replaced since the split, as by `fully_shard`: only now are all of them known.
    """

    def __init__(self, mesh: DeviceMesh, distributes: bool, sum_over_cp: bool):
        self.mesh, self.distributes, self.sum_over_cp = mesh, distributes, sum_over_cp
        self.handles: list[Any] = []
        self.started = False
        self.parameters: dict[int, dict[str, nn.Parameter]] = {}
        """Of each module that is called, by its `id`, as they were split; until the first forward."""
        self.state: torch.Tensor | None = None
        """Of the generator, before the first forward in training mode."""
        self.drew = False
        """Something did, other than the dropout of an adapter."""
        self.runs: nn.Module | None = None
        """The module whose first forward in training mode this is."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "_First":
        """A copied model has first forwards of its own, on the same mesh."""
        twin = memo[id(self)] = _First(self.mesh, self.distributes, self.sum_over_cp)
        twin.started, twin.handles = self.started, copy.deepcopy(self.handles, memo)
        return twin

    def before(self, module: nn.Module, args: tuple, kwargs: Mapping[str, Any]) -> None:
        # A recorder and fake tensors see the step itself; so does a compiler.
        if torch.compiler.is_compiling() or dispatch_is_watched() or self.runs not in (None, module):
            return
        split, self.parameters = self.parameters, {}
        retire_replaced(module, split.get(id(module), {}))
        trains = module.training and torch.is_grad_enabled()
        if not self.started or trains:
            if self.distributes:
                _check_parameters(module, self.mesh)
            if not self.sum_over_cp:
                _check_sums(module)
            _check_batch(module, args, kwargs, self.mesh)
        self.started = True
        if trains:
            self.state, self.runs = _generator_state(self.mesh), module
            dropouts_of_adapters = [part for part in module.modules() if draws_alike(part)]
            if dropouts_of_adapters:
                _check_seed(self.state, self.mesh)
            for part in dropouts_of_adapters:
                self.handles += [
                    part.register_forward_pre_hook(self.before_draw),
                    part.register_forward_hook(self.after_draw),
                ]

    def before_draw(self, *_: Any) -> None:
        """Before the dropout of an adapter draws: note whether something else has drawn."""
        self.drew |= self.state is not None and not _generator_state(self.mesh).equal(self.state)

    def after_draw(self, *_: Any) -> None:
        self.state = _generator_state(self.mesh)

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.runs is not module or self.state is None:
            return
        for handle in self.handles:
            handle.remove()
        if self.drew or not _generator_state(self.mesh).equal(self.state):
            found = ", ".join(dropouts(module))
            raise PlanError(
                f"the forward of {class_name(module)} drew random numbers "
                f"({found or 'its own code: no module has a dropout or a jitter above 0'}), but it is split over "
                f"{self.mesh.size()} ranks, whose numbers would be the same where they must differ, or differ where they "
                f"must be equal: {REMEDY if found else WHOLE}"
            )


def _check_parameters(model: nn.Module, mesh: DeviceMesh) -> None:
    """Refuse a parameter that came after the split."""
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            names = parameter.device_mesh.mesh_dim_names  # after FSDP, those of its mesh before
            ours = {"cp", "tp", "ep", *(mesh.mesh_dim_names or ())}
            if names is None or mesh.mesh_dim_names is None or ours & set(names):
                continue
        raise PlanError(
            f"parameter '{name}' was added after the model was split, so no style covers it, and its gradient would not be "
            f"summed over the ranks. Add modules before the split, with a style in the plan; {ADAPTERS}"
        )


def _check_sums(model: nn.Module) -> None:
    """Refuse FSDP2 that averages gradients which are partial sums over the context-parallel ranks."""
    for name, module in model.named_modules():
        group = fsdp_group(module) if isinstance(module, FSDPModule) else None
        if group is not None and group.gradient_divide_factor is None:
            raise PlanError(
                f"fully_shard averages the gradients of '{name}' ({class_name(module)}), and with sum_over_cp = False "
                "the gradients of the ranks of 'cp' are partial sums: call set_gradient_divide_factor() with the ranks that "
                "read other data, 1.0 for a loss that is divided by all tokens"
            )


def _check_batch(module: nn.Module, args: tuple, kwargs: Mapping[str, Any], mesh: DeviceMesh) -> None:
    """Refuse arguments of `module` that are not the same on every rank of the mesh. Collective."""
    arguments = dict(zip(positional(module), args, strict=False)) | dict(kwargs)
    essences = {name: [_essence(leaf) for leaf in tree_leaves(value)] for name, value in arguments.items()}
    for rank, (theirs, first) in _differing(essences, mesh):
        name = next(name for name in first | theirs if theirs.get(name) != first.get(name))
        raise PlanError(
            f"{class_name(module)} was called with different {name} on model-parallel rank {rank} than on rank 0: "
            "the ranks that split a model work on one batch, so read data by the rank in the data-parallel mesh, "
            "not by the global rank, and with one seed"
        )


def _check_seed(state: torch.Tensor, mesh: DeviceMesh) -> None:
    """Refuse ranks of the mesh that will draw other numbers: adapters' dropout takes them to be the same. Collective."""
    for rank, _ in _differing(checksum(state), mesh):
        raise PlanError(
            f"adapters have a dropout, and model-parallel rank {rank} would draw other numbers for it than rank 0: "
            "seed the ranks that split a model alike, by torch.manual_seed, or set lora.dropout to 0"
        )


def _differing(mine: Any, mesh: DeviceMesh) -> Iterator[tuple[int, tuple[Any, Any]]]:
    """Yield the ranks of the mesh whose value is not rank 0's, each with both values. Collective."""
    everyones = of_all(mine, mesh.get_group())
    return ((rank, (theirs, everyones[0])) for rank, theirs in enumerate(everyones) if theirs != everyones[0])


def _essence(value: Any) -> Any:
    """Return what has to be equal on all ranks of an argument."""
    if isinstance(value, torch.Tensor):
        local = value.to_local() if isinstance(value, DTensor) else value
        return tuple(value.shape), str(value.dtype), None if isinstance(value, DTensor) else checksum(local)
    return value if isinstance(value, bool | int | float | str) else type(value).__name__


def _generator_state(mesh: DeviceMesh) -> torch.Tensor:
    """Return the state of the default generator of this rank's device, on the CPU, without a synchronisation."""
    if mesh.device_type == "cpu":
        return torch.get_rng_state()
    return torch.get_device_module(mesh.device_type).get_rng_state()
