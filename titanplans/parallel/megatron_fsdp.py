"""Megatron-FSDP: sharding by the package megatron-fsdp (0.6), whose options are handed through. Never run on a GPU.

The package needs CUDA. What lives here is what we know it to get wrong without an error:

- With a shard group of one rank it doubles gradients in each micro batch (Megatron-LM #6660): refused.
- When an optimizer is registered, it takes a step with zero gradients, which counts and decays weights (#5974):
  `register_optimizer` suppresses that step. `megatron_fsdp.fully_shard` also drops parameter groups: not used.
- Under strategies 0 and 1 each micro batch would reduce again what was accumulated before: `accumulate`.

Tensor parallelism, copies (HSDP), and recomputed or compiled blocks are refused: nobody has shown them to be right.
"""

import dataclasses
import importlib
import importlib.util
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from titanplans.config import MegatronFSDPConfig
from titanplans.errors import OptionError, ParallelError
from titanplans.parallel.activation_checkpoint import is_recomputed
from titanplans.tensor_parallel.decoder import find_decoder
from titanplans.torch_private import compiled_call

_INSTEAD = "take FSDP2Config"
_EXTRA = "the package megatron-fsdp, which is not installed: pip install titanplans[megatron-fsdp]"
_SET_HERE = {"init_model_with_meta_device", "sync_model_each_microbatch"}
"""Switches of the package's that are no `options`: the model and `accumulate` decide them."""


def apply_megatron_fsdp(
    model: nn.Module, mesh: DeviceMesh, config: MegatronFSDPConfig, *, shard_dim: str = "dp_shard"
) -> nn.Module:
    """Return `model` wrapped in megatron_fsdp.MegatronFSDP, its parameters sharded; `.module` is the model.

    Build the optimizer on the result's parameters, then call `register_optimizer`.

    Args:
        model: a decoder on CUDA; or on meta, where each module has a `reset_parameters`.
        mesh: with named dimensions, of which all but `shard_dim` have size 1.
        config: the options.
        shard_dim: the dimension over which the model is sharded, whose ranks read different data.

    Raises:
        ParallelError: no CUDA, no package, an option that the package does not take, or a mesh or model that
            is not supported. Before anything is sharded.
        PlanError: `model` has no list of blocks, and `config` names no classes.
    """
    check_available()
    library = importlib.import_module("megatron_fsdp")
    refuse_mesh(mesh, shard_dim)
    if mesh.device_type != "cuda":
        raise ParallelError(f'megatron_fsdp over a mesh of {mesh.device_type}: build the mesh for "cuda"')
    return library.fully_shard_model(**arguments(library, model, mesh, config, shard_dim))


def check_available() -> None:
    """Raise ParallelError unless there are CUDA and the package."""
    missing = [] if torch.cuda.is_available() else [f"CUDA, and torch sees no such device: {_INSTEAD}"]
    missing += [] if _installed() else [_EXTRA]
    if missing:
        raise ParallelError(f"megatron_fsdp needs {'; and '.join(missing)}")


def _installed() -> bool:
    return importlib.util.find_spec("megatron_fsdp") is not None


def arguments(
    library: ModuleType, model: nn.Module, mesh: DeviceMesh, config: MegatronFSDPConfig, shard_dim: str
) -> dict[str, Any]:
    """Return the arguments of `library.fully_shard_model`.

    Raises:
        ParallelError: the package does not take an option, or the model can't be sharded by it.
        PlanError: `model` has no list of blocks, and `config` names no classes.
    """
    _refuse_model(model)
    parameters = inspect.signature(library.fully_shard_model).parameters.values()
    switches = {p.name for p in parameters if isinstance(p.default, bool)} - _SET_HERE
    dtypes = {item.name for item in dataclasses.fields(library.MixedPrecisionPolicy)}
    # Gradients are summed over ranks: all loops here divide the loss by the tokens of the whole batch.
    given: dict[str, Any] = {"calculate_per_token_loss": True}
    policy: dict[str, torch.dtype | None] = {}
    for name, value in config.options.items():
        if name in dtypes:
            policy[name] = _dtype(name, value)
        elif name not in switches:
            why = f"megatron-fsdp {library.__version__} has no such option; there are {', '.join(sorted(switches | dtypes))}"
            raise OptionError(f"options.{name}", value, why)
        elif not isinstance(value, bool):
            raise OptionError(f"options.{name}", value, "expected true or false")
        else:
            given[name] = value
    return given | {
        "module": model,
        "device_mesh": mesh,
        "dp_shard_dim": shard_dim,
        "fsdp_unit_modules": unit_classes(model, config),
        "zero_dp_strategy": config.zero_dp_strategy,
        "init_model_with_meta_device": any(p.is_meta for p in model.parameters()),
        "mixed_precision_policy": library.MixedPrecisionPolicy(**policy),
    }


def _dtype(name: str, value: Any) -> torch.dtype | None:
    """Return the dtype that `value` names; "none" leaves it to the package."""
    dtype = getattr(torch, str(value), None)
    if value != "none" and not isinstance(dtype, torch.dtype):
        raise OptionError(
            f"options.{name}", value, 'expected the name of a dtype such as "float32", or "none"'
        )
    return dtype


def unit_classes(model: nn.Module, config: MegatronFSDPConfig) -> list[type[nn.Module]]:
    """Return the classes of the modules that are gathered at once: those named, or those of the decoder's blocks.

    Raises:
        ParallelError: no module is of a class that is named.
        PlanError: `model` has no list of blocks, and `config` names no classes.
    """
    names = config.fsdp_unit_modules
    if names is None:
        return list(dict.fromkeys(type(block.module) for block in find_decoder(model).blocks))
    classes = dict.fromkeys(type(module) for module in model.modules())
    there = {cls.__name__ for cls in classes}
    for name in names:
        if name not in there:
            why = f'no module of the model is of class "{name}"; give one of {", ".join(sorted(there))}'
            raise config.error("fsdp_unit_modules", why)
    return [cls for cls in classes if cls.__name__ in names]


def refuse_mesh(mesh: DeviceMesh, shard_dim: str) -> None:
    """Raise ParallelError for a mesh that is not sharded over by `shard_dim` alone, above 1."""
    names = mesh.mesh_dim_names or ()
    if shard_dim not in names:
        there = ", ".join(names) or "none"
        raise ParallelError(f'megatron_fsdp: the mesh has no dimension named "{shard_dim}": it has {there}')
    for name in names:
        size = mesh.size(names.index(name))
        if name == shard_dim and size == 1:
            raise ParallelError(
                f"megatron_fsdp over {name} = 1: over one rank it doubles gradients in each micro batch; raise {name}, "
                f"or {_INSTEAD}"
            )
        if name != shard_dim and size > 1:
            raise ParallelError(
                f"megatron_fsdp with {name} = {size}: it is not known to be right but for sharding alone; set it to 1, "
                f"or {_INSTEAD}"
            )


def _refuse_model(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            axes = parameter.device_mesh.mesh_dim_names
            raise ParallelError(f"megatron_fsdp: {name} is split over the mesh {axes} already; {_INSTEAD}")
    for name, module in model.named_modules():
        done = "recomputed" if is_recomputed(module) else "compiled" if compiled_call(module) else None
        if done:
            raise ParallelError(
                f"megatron_fsdp: {name or 'the model'} is {done}, which was never shown to be right; leave that out, "
                f"or {_INSTEAD}"
            )


def register_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Let `optimizer`, built on the parameters of a model of `apply_megatron_fsdp`, step and zero its gradients.

    States are made in the first step, not here. Build a learning-rate schedule afterwards.

    Raises:
        ParallelError: no package, or parameters that are not such a model's.
    """
    if not _installed():
        raise ParallelError(f"megatron_fsdp needs {_EXTRA}")
    if not all(
        hasattr(p, "_megatron_fsdp_model") for group in optimizer.param_groups for p in group["params"]
    ):
        raise ParallelError(
            f"{type(optimizer).__name__} holds parameters that megatron-fsdp does not manage: build it on the "
            "parameters of what apply_megatron_fsdp returned"
        )

    def take_no_step() -> None: ...

    optimizer.step = take_no_step  # pyrefly: ignore[bad-assignment]
    try:
        importlib.import_module("megatron_fsdp").fully_shard_optimizer(optimizer)
    finally:
        if optimizer.step is take_no_step:
            del optimizer.step  # the class's is there again


@contextmanager
def accumulate(model: Any, *, last: bool) -> Iterator[None]:
    """Run forward and backward of one micro batch; gradients are whole after the last one's backward.

    Args:
        model: what `apply_megatron_fsdp` returned.
        last: whether this is the last micro batch before the optimizer's step.
    """
    model.set_model_auto_sync(last)
    try:
        yield
    finally:
        model.set_model_auto_sync(True)
