"""Megatron-FSDP, the package megatron-fsdp: what its options are here, and what of it is kept away from a model.

It needs CUDA, so everything is checked before the package sees the model. An option reaches the package or is
refused by name. What the package would get wrong without an error is refused here, or done otherwise:

- A shard group of one rank doubles gradients in each micro batch (Megatron-LM #6660): refused.
- Registering an optimizer takes a step with gradients of zero, which counts, and decays weights (#5974):
  `register_optimizer` registers without it. `megatron_fsdp.fully_shard` is not used: it also drops parameter groups.
- Under strategies 0 and 1 each micro batch would reduce what was accumulated once more: `accumulate`.
- Options that are overridden or have no effect: refused when `MegatronFSDPConfig` is made.

Not shown to be right by anyone, and refused: tensor parallelism, copies (HSDP), recomputed or compiled blocks.
"""

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
from titanplans.errors import ParallelError
from titanplans.parallel.activation_checkpoint import is_recomputed
from titanplans.tensor_parallel.decoder import find_decoder
from titanplans.torch_private import compiled_call

_INSTEAD = "take FSDP2Config"
_NAMES = {
    "megatron_fsdp_unit_modules": "fsdp_unit_modules",
    "init_fsdp_with_meta_device": "init_model_with_meta_device",
}
"""The package's names where they differ."""
_DTYPES = {"preserve_fp32_weights": "main_params_dtype", "grad_reduce_in_fp32": "main_grads_dtype"}
"""Options that are fields of the package's MixedPrecisionPolicy."""


def apply_megatron_fsdp(
    model: nn.Module, mesh: DeviceMesh, config: MegatronFSDPConfig, *, shard_dim: str = "dp_shard"
) -> nn.Module:
    """Return `model` wrapped in megatron_fsdp.MegatronFSDP, whose parameters are sharded; `.module` is the model.

    Build the optimizer on the result's parameters, then call `register_optimizer`.

    Args:
        model: a decoder on CUDA, or on meta if `config` says so.
        mesh: with named dimensions, of which all but `shard_dim` have size 1.
        config: the options.
        shard_dim: the name of the dimension whose ranks read different data, and shard the model.

    Raises:
        ParallelError: no CUDA, no package, an option that this version does not take, or a mesh or model
            that it can't have. Before anything is sharded.
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
    if not _installed():
        missing.append(_EXTRA)
    if missing:
        raise ParallelError(f"megatron_fsdp needs {'; and '.join(missing)}")


def arguments(
    library: ModuleType, model: nn.Module, mesh: DeviceMesh, config: MegatronFSDPConfig, shard_dim: str
) -> dict[str, Any]:
    """Return the arguments of `library.fully_shard_model`.

    Raises:
        ParallelError: this version of the package does not take an option, or the model can't have it.
        PlanError: `model` has no list of blocks, and `config` names no classes.
    """
    _refuse_model(model, config)
    _refuse_extras(config)
    taken = inspect.signature(library.fully_shard_model).parameters
    policy = inspect.signature(library.MixedPrecisionPolicy).parameters
    given: dict[str, Any] = {}
    dtypes: dict[str, torch.dtype | None] = {}
    for name, value in config.to_dict().items():
        theirs = _DTYPES.get(name) or _NAMES.get(name, name)
        if theirs not in (policy if name in _DTYPES else taken):
            # The two that an installed version may lack unless they are asked for.
            if name in ("check_for_nan_in_grad", "activation_checkpointing") and value is False:
                continue
            raise config.error(
                name,
                f"megatron-fsdp {library.__version__} does not take it: leave it out, or install another version",
            )
        if name in _DTYPES:
            dtypes[theirs] = torch.float32 if value else None
        else:
            given[theirs] = value
    return given | {
        "module": model,
        "device_mesh": mesh,
        "dp_shard_dim": shard_dim,
        "fsdp_unit_modules": unit_classes(model, config),
        "mixed_precision_policy": library.MixedPrecisionPolicy(**dtypes),
    }


def register_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Let `optimizer`, built on the parameters of a model of `apply_megatron_fsdp`, step and zero its gradients.

    States are made in the first step, not here. Build a learning-rate schedule afterwards.

    Raises:
        ParallelError: no package, or parameters that are not such a model's.
    """
    if not _installed():
        raise ParallelError(f"megatron_fsdp needs {_EXTRA}")
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if not all(hasattr(p, "_megatron_fsdp_model") for p in parameters):
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


def unit_classes(model: nn.Module, config: MegatronFSDPConfig) -> list[type[nn.Module]]:
    """Return the classes of the modules that are gathered at once: those named, or those of the decoder's blocks.

    Raises:
        ParallelError: no module, or modules of several classes, have such a name.
        PlanError: `model` has no list of blocks, and `config` names no classes.
    """
    names = config.megatron_fsdp_unit_modules
    if names is None:
        return list(dict.fromkeys(type(block.module) for block in find_decoder(model).blocks))
    classes = {
        cls for module in model.modules() for cls in type(module).__mro__ if issubclass(cls, nn.Module)
    }
    classes.discard(nn.Module)
    found = []
    for name in names:
        matching = [cls for cls in classes if name in (cls.__name__, _path(cls))]
        if len(matching) != 1:
            seen = sorted(_path(cls) for cls in matching or {type(m) for m in model.children()})
            why = "several classes have that name" if matching else "no module of the model is of that class"
            raise ParallelError(
                f'megatron_fsdp.megatron_fsdp_unit_modules names "{name}": {why}; give one of {", ".join(seen)}'
            )
        found += matching
    return found


def refuse_mesh(mesh: DeviceMesh, shard_dim: str) -> None:
    """Refuse a mesh that megatron-fsdp would not shard over as a whole.

    Raises:
        ParallelError: unnamed dimensions, no dimension `shard_dim`, one of size 1, or others above 1.
    """
    names = mesh.mesh_dim_names
    if names is None:
        raise ParallelError(
            "megatron_fsdp over a mesh without names of dimensions: give mesh_dim_names, or a Mesh's"
        )
    if shard_dim not in names:
        raise ParallelError(
            f'megatron_fsdp: the mesh has no dimension "{shard_dim}": shard_dim is one of {", ".join(names)}'
        )
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


_EXTRA = "the package megatron-fsdp, which is not installed: pip install titanplans[megatron-fsdp]"


def _installed() -> bool:
    return importlib.util.find_spec("megatron_fsdp") is not None


def _refuse_model(model: nn.Module, config: MegatronFSDPConfig) -> None:
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            raise ParallelError(
                f"megatron_fsdp: {name} is split over the mesh {parameter.device_mesh.mesh_dim_names} already; {_INSTEAD}"
            )
    for name, module in model.named_modules():
        if is_recomputed(module):
            raise ParallelError(
                f"megatron_fsdp: {name} is recomputed, which it is not known to bear; leave that out, or {_INSTEAD}"
            )
        if compiled_call(module) is not None:
            raise ParallelError(
                f"megatron_fsdp: {name or 'the model'} is compiled, which it is not known to bear; leave that out, "
                f"or {_INSTEAD}"
            )
    meta = [name for name, p in model.named_parameters() if p.is_meta]
    if meta and not config.init_fsdp_with_meta_device:
        raise config.error(
            "init_fsdp_with_meta_device",
            f"{len(meta)} parameters are on meta, {meta[0]} among them: set it to true, or give them values",
        )
    if not meta and config.init_fsdp_with_meta_device:
        raise config.error("init_fsdp_with_meta_device", "no parameter is on meta: set it to false")
    for name, module in model.named_modules():
        own = any(p.is_meta for p in module.parameters(recurse=False))
        if own and not (hasattr(module, "reset_parameters") or hasattr(module, "_reset_parameters")):
            raise config.error(
                "init_fsdp_with_meta_device",
                f"{name} ({type(module).__name__}) has no reset_parameters to give its parameters values: build the "
                "model elsewhere than on meta",
            )


def _refuse_extras(config: MegatronFSDPConfig) -> None:
    """Refuse what needs a further package; the library has looked for them when it was imported."""
    buffers = importlib.import_module("megatron_fsdp.param_and_grad_buffer")
    if config.keep_fp8_transpose_cache and not buffers.HAVE_TE:
        raise config.error(
            "keep_fp8_transpose_cache", "it is Transformer Engine's, which is not installed: leave it out"
        )
    if config.nccl_ub and buffers.NCCL_ALLOCATOR is None:
        raise config.error(
            "nccl_ub",
            "needs the NCCL allocator of megatron-core or apex, and neither is installed: leave it out",
        )


def _path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
