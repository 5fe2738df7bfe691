"""Checks that run in the first forward of a split model, because what they check is not known earlier.

All ranks must get the same batch, no parameter may have been added since the split, and the first forward in training
mode may not draw random numbers. The hooks then remove themselves, so later forwards cost nothing.
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
from titanplans.split.guards.dropout import REMEDY, UNSPLIT, dropouts, is_split_invariant
from titanplans.split.objects import gather_objects
from titanplans.split.parameters.replaced import parameters_of, retire_replaced
from titanplans.text import class_name
from titanplans.torch_private.dispatch import has_dispatch_mode, tree_leaves
from titanplans.torch_private.fsdp import fsdp_group


def check_first_forward(
    model: nn.Module, base: nn.Module, mesh: DeviceMesh, distributes: bool, *, sum_over_cp: bool
) -> None:
    """Install the checks before and after the first forward of `model`, or of `base` inside it, whichever is called.

    Args:
        model: the split model.
        base: the module that holds its blocks; the wrapper of an adapter calls it without calling the model.
        mesh: 1-D, all ranks that work on the same batch.
        distributes: whether the parameters are DTensors.
        sum_over_cp: whether `align_gradients`, and not FSDP2, sums the gradients over the CP ranks.
    """
    hooks = _FirstForward(mesh, distributes, sum_over_cp)
    for module in {model: None, base: None}:
        hooks.parameters[id(module)] = parameters_of(module)
        hooks.handles += [
            module.register_forward_pre_hook(hooks.before, prepend=True, with_kwargs=True),
            module.register_forward_hook(hooks.after),
        ]


class _FirstForward:
    """The hooks of the first forwards of one model.

    They also retire parameters that were replaced after the split, for example by `fully_shard`, since only now all of
    them are known.
    """

    def __init__(self, mesh: DeviceMesh, distributes: bool, sum_over_cp: bool):
        self.mesh, self.distributes, self.sum_over_cp = mesh, distributes, sum_over_cp
        self.handles: list[Any] = []
        self.has_started = False
        self.parameters: dict[int, dict[str, nn.Parameter]] = {}
        """Maps the `id` of each module that may be called to its parameters after the split; emptied by the first
        forward."""
        self.generator_state: torch.Tensor | None = None
        """The generator's state before the first forward in training mode, and after each draw of an adapter's dropout."""
        self.has_drawn = False
        """Something other than an adapter's dropout has drawn random numbers."""
        self.running: nn.Module | None = None
        """The module that now runs its first forward in training mode; None if no such forward runs."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "_FirstForward":
        """Give a copied model its own hooks, on the same mesh."""
        twin = memo[id(self)] = _FirstForward(self.mesh, self.distributes, self.sum_over_cp)
        twin.has_started, twin.handles = self.has_started, copy.deepcopy(self.handles, memo)
        return twin

    def before(self, module: nn.Module, args: tuple, kwargs: Mapping[str, Any]) -> None:
        # A compiler would trace the checks, and a dispatch mode (a recorder, fake tensors) would record them.
        if torch.compiler.is_compiling() or has_dispatch_mode() or self.running not in (None, module):
            return
        parameters, self.parameters = self.parameters, {}
        retire_replaced(module, parameters.get(id(module), {}))
        trains = module.training and torch.is_grad_enabled()
        if not self.has_started or trains:
            if self.distributes:
                _check_parameters(module, self.mesh)
            if not self.sum_over_cp:
                _check_sums(module)
            _check_batch(module, args, kwargs, self.mesh)
        self.has_started = True
        if trains:
            self.generator_state, self.running = _generator_state(self.mesh), module
            dropouts_of_adapters = [child for child in module.modules() if is_split_invariant(child)]
            if dropouts_of_adapters:
                _check_seed(self.generator_state, self.mesh)
            for dropout in dropouts_of_adapters:
                self.handles += [
                    dropout.register_forward_pre_hook(self.before_draw),
                    dropout.register_forward_hook(self.after_draw),
                ]

    def before_draw(self, *_: Any) -> None:
        """Before the dropout of an adapter draws, note whether something else has drawn."""
        state = self.generator_state
        self.has_drawn |= state is not None and not _generator_state(self.mesh).equal(state)

    def after_draw(self, *_: Any) -> None:
        self.generator_state = _generator_state(self.mesh)

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.running is not module or self.generator_state is None:
            return
        for handle in self.handles:
            handle.remove()
        if self.has_drawn or not _generator_state(self.mesh).equal(self.generator_state):
            probabilities = ", ".join(dropouts(module))
            source = probabilities or "its own code: no module has a dropout or a jitter above 0"
            raise PlanError(
                f"the forward of {class_name(module)} drew random numbers ({source}), but it is split over "
                f"{self.mesh.size()} ranks, whose numbers would be equal where they must differ, or differ where they "
                f"must be equal: {REMEDY if probabilities else UNSPLIT}"
            )


def _check_parameters(model: nn.Module, mesh: DeviceMesh) -> None:
    """Refuse a parameter that was added after the split."""
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            # After FSDP the names of FSDP's mesh dimensions come first.
            names = parameter.device_mesh.mesh_dim_names
            split_names = {"cp", "tp", "ep", *(mesh.mesh_dim_names or ())}
            if names is None or mesh.mesh_dim_names is None or split_names & set(names):
                continue
        raise PlanError(
            f"parameter '{name}' was added after the model was split, so no style covers it, and its gradient would not be "
            f"summed over the ranks. Add modules before the split, with a style in the plan; {ADAPTERS}"
        )


def _check_sums(model: nn.Module) -> None:
    """Refuse FSDP2 modules that average gradients which are partial sums over the context-parallel ranks."""
    for name, module in model.named_modules():
        group = fsdp_group(module) if isinstance(module, FSDPModule) else None
        if group is not None and group.gradient_divide_factor is None:
            raise PlanError(
                f"fully_shard averages the gradients of '{name}' ({class_name(module)}), but with sum_over_cp = False "
                "the gradients of the ranks of 'cp' are partial sums: call set_gradient_divide_factor() with the number of "
                "ranks that read different data, 1.0 for a loss that is divided by all tokens"
            )


def _check_batch(module: nn.Module, args: tuple, kwargs: Mapping[str, Any], mesh: DeviceMesh) -> None:
    """Refuse arguments of `module` that are not the same on every rank of the mesh. Collective."""
    arguments = dict(zip(positional(module), args, strict=False)) | dict(kwargs)
    prints = {name: [_fingerprint(leaf) for leaf in tree_leaves(value)] for name, value in arguments.items()}
    for rank, (other, first) in _differing_ranks(prints, mesh):
        name = next(name for name in first | other if other.get(name) != first.get(name))
        raise PlanError(
            f"{class_name(module)} was called with different {name} on model-parallel rank {rank} than on rank 0: the "
            "ranks that split a model work on one batch, so select data by the rank in the data-parallel mesh, not by "
            "the global rank, and use one seed"
        )


def _check_seed(state: torch.Tensor, mesh: DeviceMesh) -> None:
    """Refuse ranks of the mesh that would draw different numbers: an adapter's dropout needs equal ones. Collective."""
    for rank, _ in _differing_ranks(checksum(state), mesh):
        raise PlanError(
            f"adapters have a dropout, and model-parallel rank {rank} would draw other numbers for it than rank 0: "
            "give all ranks that split a model the same seed (torch.manual_seed), or set lora.dropout to 0"
        )


def _differing_ranks(value: Any, mesh: DeviceMesh) -> Iterator[tuple[int, tuple[Any, Any]]]:
    """Yield each rank of the mesh whose value is not rank 0's, with its value and rank 0's. Collective."""
    values = gather_objects(value, mesh.get_group())
    return ((rank, (other, values[0])) for rank, other in enumerate(values) if other != values[0])


def _fingerprint(value: Any) -> Any:
    """Return the properties of an argument that have to be equal on all ranks."""
    if isinstance(value, torch.Tensor):
        local = value.to_local() if isinstance(value, DTensor) else value
        return tuple(value.shape), str(value.dtype), None if isinstance(value, DTensor) else checksum(local)
    return value if isinstance(value, bool | int | float | str) else type(value).__name__


def _generator_state(mesh: DeviceMesh) -> torch.Tensor:
    """Return the state of the default generator of this rank's device, on the CPU, without a synchronisation."""
    if mesh.device_type == "cpu":
        return torch.get_rng_state()
    return torch.get_device_module(mesh.device_type).get_rng_state()
