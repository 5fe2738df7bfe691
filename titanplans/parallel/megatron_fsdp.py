"""Sharding with the package megatron-fsdp (0.6). Start at `apply_megatron_fsdp`.

This code has never run on a GPU, and the package needs CUDA. Tensor parallelism, HSDP, and checkpointed or compiled blocks
are refused, because they are untested.
"""

import dataclasses
import importlib
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
from titanplans.extras import is_installed, missing_library
from titanplans.parallel.activation_checkpoint import is_recomputed
from titanplans.split.decoder import find_decoder
from titanplans.torch_private.modules import compiled_call

_SET_HERE = {"init_model_with_meta_device", "sync_model_each_microbatch"}
"""Boolean options of the package that titanplans sets, because the model and `accumulate` determine them; users can't set
them."""


def apply_megatron_fsdp(model: nn.Module, mesh: DeviceMesh, config: MegatronFSDPConfig) -> nn.Module:
    """Shard the parameters of `model` and return it wrapped in `megatron_fsdp.MegatronFSDP`; `.module` is the model.

    Build the optimizer on the wrapper's parameters, then call `register_optimizer`.

    Args:
        model: a decoder on CUDA, or on meta if each of its modules has `reset_parameters`.
        mesh: on CUDA, with named dimensions, all of size 1 except "dp_shard", whose ranks read different data.
        config: the options, which are passed on to the package.

    Raises:
        MissingLibrary: megatron-fsdp is not installed.
        ParallelError: there is no CUDA device, the package lacks an option, or the mesh or model is not supported.
            Raised before anything is sharded.
        PlanError: `model` has no list of blocks, and `config` names no classes.
    """
    check_available()
    library = importlib.import_module("megatron_fsdp")
    refuse_mesh(mesh)
    return library.fully_shard_model(**arguments(library, model, mesh, config))


def check_available() -> None:
    """Raise an error unless CUDA and the package are available."""
    missing = missing_library("megatron_fsdp", "it" if not torch.cuda.is_available() else "megatron_fsdp")
    if not torch.cuda.is_available():
        also = "" if is_installed("megatron_fsdp") else f"; and {missing}"
        raise ParallelError(f"megatron_fsdp needs CUDA, and torch sees no such device: use FSDP2Config{also}")
    if not is_installed("megatron_fsdp"):
        raise missing


def refuse_mesh(mesh: DeviceMesh) -> None:
    """Raise ParallelError unless "dp_shard" is above 1 and all other dimensions of `mesh` are 1."""
    for name, size in zip(mesh.mesh_dim_names or (), mesh.shape, strict=True):
        why = ""
        if name == "dp_shard" and size == 1:  # Megatron-LM #6660
            why = "over one rank it doubles gradients in each micro batch; raise it, or use FSDP2Config"
        elif name != "dp_shard" and size > 1:
            why = "only sharding is known to be correct; set it to 1, or use FSDP2Config"
        if why:
            raise ParallelError(f"megatron_fsdp with {name} = {size}: {why}")


def arguments(
    library: ModuleType, model: nn.Module, mesh: DeviceMesh, config: MegatronFSDPConfig
) -> dict[str, Any]:
    """Return the arguments of `library.fully_shard_model`.

    Raises:
        ParallelError, PlanError: as `apply_megatron_fsdp`.
    """
    tensors = (name for name, parameter in model.named_parameters() if isinstance(parameter, DTensor))
    modules = (name for name, m in model.named_modules() if is_recomputed(m) or compiled_call(m))
    for name in (*tensors, *modules):
        raise ParallelError(
            f"megatron_fsdp: {name or 'the model'} is split, recomputed or compiled, which is not tested; switch "
            "it off, or use FSDP2Config"
        )
    parameters = inspect.signature(library.fully_shard_model).parameters.values()
    switches = {p.name for p in parameters if isinstance(p.default, bool)} - _SET_HERE
    dtypes = {item.name for item in dataclasses.fields(library.MixedPrecisionPolicy)}
    # This option makes the package sum gradients instead of averaging them: the loss is divided by the tokens of the global
    # batch.
    options, policy = {"calculate_per_token_loss": True}, {}
    for name, value in config.options.items():
        dtype = None if value == "none" else getattr(torch, str(value), value)
        if name in switches and isinstance(value, bool):
            options[name] = value
        elif name in dtypes and (dtype is None or isinstance(dtype, torch.dtype)):
            policy[name] = dtype
        else:
            available = ", ".join(sorted(switches | dtypes))
            why = f"megatron-fsdp {library.__version__} has no such option; there are {available}"
            if name in switches | dtypes:
                why = (
                    f"expected {'true or false' if name in switches else 'a dtype such as float32, or none'}"
                )
            raise OptionError(f"options.{name}", value, why)
    return options | {
        "module": model,
        "device_mesh": mesh,
        "dp_shard_dim": "dp_shard",
        "fsdp_unit_modules": unit_classes(model, config),
        "zero_dp_strategy": config.zero_dp_strategy,
        "init_model_with_meta_device": any(p.is_meta for p in model.parameters()),
        "mixed_precision_policy": library.MixedPrecisionPolicy(**policy),
    }


def unit_classes(model: nn.Module, config: MegatronFSDPConfig) -> list[type[nn.Module]]:
    """Return the classes of the FSDP units: those named in `config`, by default the classes of the decoder's blocks.

    Raises:
        ParallelError, PlanError: as `apply_megatron_fsdp`.
    """
    if (names := config.fsdp_unit_modules) is None:
        return list(dict.fromkeys(type(block.module) for block in find_decoder(model).blocks))
    classes = dict.fromkeys(type(module) for module in model.modules())
    class_names = sorted({cls.__name__ for cls in classes})
    if missing := [name for name in names if name not in class_names]:
        why = f'no module of the model is of class "{missing[0]}"; give one of {", ".join(class_names)}'
        raise config.error("fsdp_unit_modules", why)
    return [cls for cls in classes if cls.__name__ in names]


def register_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Let Megatron-FSDP manage `optimizer`, which was built on the parameters of the model of `apply_megatron_fsdp`.

    The optimizer's state is created in its first step. Build a learning-rate scheduler after this call.

    Raises:
        ParallelError: Megatron-FSDP does not manage the optimizer's parameters.
    """
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    if not all(hasattr(parameter, "_megatron_fsdp_model") for parameter in parameters):
        raise ParallelError(
            f"{type(optimizer).__name__} holds parameters that megatron-fsdp does not manage: build it on the "
            "parameters of the model that apply_megatron_fsdp returned"
        )

    # `fully_shard_optimizer` runs one optimizer step with zero gradients. The optimizer counts this step and decays the
    # weights in it (Megatron-LM #5974), so `step` does nothing during the call. `megatron_fsdp.fully_shard`, which shards
    # the model and the optimizer, is not used because it drops parameter groups.
    def take_no_step() -> None: ...

    optimizer.step = take_no_step  # pyrefly: ignore[bad-assignment]
    try:
        importlib.import_module("megatron_fsdp").fully_shard_optimizer(optimizer)
    finally:
        if optimizer.step is take_no_step:
            del optimizer.step  # restores the method of the class


@contextmanager
def accumulate(model: Any, *, last: bool) -> Iterator[None]:
    """Run the forward and backward of one micro batch; gradients are complete after the last one's backward.

    Args:
        model: returned by `apply_megatron_fsdp`.
        last: whether this is the last micro batch before the optimizer's step.
    """
    # Under the sharding strategies 0 and 1 every micro batch would otherwise reduce the accumulated gradients again.
    model.set_model_auto_sync(last)
    try:
        yield
    finally:
        model.set_model_auto_sync(True)
