"""torch.compile: the blocks of a model, the loss, the optimizer's step. Nothing here is compiled before it runs.

Modules are compiled in place, so that the module that trains is the compiled one and names stay. Equal
blocks share one compiled artefact, because the compiler sees one function with other parameters.
"""

import functools
import warnings
from collections.abc import Callable
from types import MethodType
from typing import Any, TypeVar

import torch
import torch._functorch.config
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper

from parallel.activation_checkpoint import MemoryBudget, memory_budget
from parallel.blocks import block_lists
from parallel.errors import ParallelError
from parallel.kept import Kept

COMPONENTS = ("model", "loss", "optimizer")
MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")

F = TypeVar("F", bound=Callable[..., Any])


def apply_compile(model: nn.Module, compile_config: Any, parallel_dims: Any) -> None:
    """Compile each block in place; names and parameters stay as they are.

    A block must become one graph, and it is an error if it does not, unless it holds modules of
    flash-linear-attention, whose kernels take themselves out of every graph. Such a block is compiled inside of
    the checkpoint around it, so that a recomputation runs the compiled graphs again, and can't keep operators.

    Args:
        model: the model, its policy of activation checkpointing applied.
        compile_config: `backend` and `enable_async_tensor_parallel`; where it has them, `mode`, `dynamic`,
            `fullgraph` and `options`, as torch.compile has them. `fullgraph` None is the rule above.
        parallel_dims: the mesh "tp", for async tensor parallelism.

    Raises:
        ParallelError: an option can't be honoured.
    """
    options = compile_options(compile_config)
    fullgraph = getattr(compile_config, "fullgraph", None)
    blocks = [(name, model.get_submodule(name)) for names in block_lists(model, "all") for name in names]
    check_fullgraph(model, fullgraph)
    for _, block in blocks:
        if any(isinstance(module, Kept) for module in block.modules()):
            raise ParallelError(
                "a mixer that is kept from recomputation can't be in a compiled block: switch compile off, or "
                "recompute the MLP only"
            )
    if compile_config.enable_async_tensor_parallel:
        _enable_async_tp(parallel_dims)
    # Under checkpointing the recomputation would replay Python side effects that a graph can't. The setting
    # is the process's, read when a block first runs.
    torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
    # One for all blocks of a budget: blocks with different backends are compiled apart.
    backends: dict[MemoryBudget | None, Any] = {None: options.pop("backend")}
    for _, block in blocks:
        budget = memory_budget(block)
        if budget not in backends:
            assert budget is not None
            backends[budget] = _budgeted(backends[None], budget)
        one_graph = not holds_fla(block) if fullgraph is None else fullgraph
        # A checkpoint is compiled as one graph or not at all: where there are several, it stays outside.
        inside = block if one_graph or not isinstance(block, ActivationWrapper) else _wrapped(block)
        inside.compile(backend=backends[budget], fullgraph=one_graph, **options)


def compile_loss(fn: F, compile_config: Any) -> F:
    """Return the loss function `fn` compiled; options as for `apply_compile`, `fullgraph` None is False.

    A module is compiled in place and returned.
    """
    options = compile_options(compile_config) | {
        "fullgraph": bool(getattr(compile_config, "fullgraph", None))
    }
    if isinstance(fn, nn.Module):
        fn.compile(**options)
        return fn
    return torch.compile(fn, **options)  # pyrefly: ignore[bad-return]


def compile_optimizer(optimizer: torch.optim.Optimizer, compile_config: Any) -> torch.optim.Optimizer:
    """Compile the step of `optimizer` in place and return it; options as for `compile_loss`.

    Learning rates become tensors: a number would be part of the compiled step, and each change of it a
    compilation. Schedulers may be attached before or after.

    Raises:
        ParallelError: the step is a fused kernel, or foreach's in a form that takes no tensor.
    """
    options = compile_options(compile_config) | {
        "fullgraph": bool(getattr(compile_config, "fullgraph", None))
    }
    for group in optimizer.param_groups:
        if group.get("fused"):
            raise ParallelError(
                "a fused optimizer step is one kernel, of which nothing is left to compile: leave 'optimizer' out of "
                "compile.components, or choose foreach"
            )
        if group.get("foreach") and group.get("capturable") is False:
            raise ParallelError(
                f"{type(optimizer).__name__} with foreach takes a learning rate that is a tensor, as its compiled step "
                "needs, only with capturable: build it with capturable=True, or leave foreach out"
            )
    for group in optimizer.param_groups:
        if not isinstance(group["lr"], torch.Tensor):
            group["lr"] = torch.tensor(group["lr"])
    compiled = torch.compile(optimizer.step, **options)

    @functools.wraps(optimizer.step)
    def step(_: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        return compiled(*args, **kwargs)

    # A method, as schedulers expect: they bind what they find.
    optimizer.step = MethodType(step, optimizer)  # pyrefly: ignore[bad-assignment]
    return optimizer


def compile_options(compile_config: Any) -> dict[str, Any]:
    """Return torch.compile's arguments, all but `fullgraph`, from a config that may lack some.

    Raises:
        ParallelError: an unknown mode, or options that exclude each other.
    """
    options = {"backend": compile_config.backend}
    for name in ("mode", "dynamic", "options"):
        value = getattr(compile_config, name, None)
        if value is not None:
            options[name] = value
    backend = options["backend"]
    if isinstance(backend, str) and backend not in torch._dynamo.list_backends(exclude_tags=()):
        usual = ", ".join(torch._dynamo.list_backends())
        raise ParallelError(f"compile.backend = {backend!r}: torch has {usual}, and some for debugging")
    mode = options.get("mode")
    if mode is not None and mode not in MODES:
        raise ParallelError(f"compile.mode = {mode!r}: one of {', '.join(MODES)}")
    if "mode" in options and "options" in options:
        raise ParallelError("compile.mode and compile.options exclude each other: leave one of the two out")
    for name in ("mode", "options"):
        if name in options and options["backend"] != "inductor":
            raise ParallelError(
                f"compile.{name} is inductor's, and compile.backend = {options['backend']!r}: leave {name} out"
            )
    if "options" in options:
        unknown = [
            key for key in options["options"] if key.replace("-", "_") not in torch._inductor.list_options()
        ]
        if unknown:
            raise ParallelError(
                f"compile.options has {unknown[0]!r}, which inductor does not know: torch._inductor.list_options() has all"
            )
    return options


def check_fullgraph(model: nn.Module, fullgraph: bool | None) -> None:
    """Raise ParallelError if `fullgraph` is asked of blocks that can't become one graph."""
    for name in (name for names in block_lists(model, "all") for name in names):
        if fullgraph and holds_fla(model.get_submodule(name)):
            raise ParallelError(
                f"compile.fullgraph = true, but {name} holds modules of flash-linear-attention, whose kernels take "
                "themselves out of every graph: leave fullgraph out"
            )


def one_graph_a_block(model: nn.Module) -> bool:
    """Whether every block of `model` can become a single graph."""
    return not any(
        holds_fla(model.get_submodule(name)) for names in block_lists(model, "all") for name in names
    )


def _budgeted(backend: Any, budget: MemoryBudget) -> Callable[..., Any]:
    """Return `backend` as it compiles under `budget`: the settings hold while it works, and no longer."""
    from torch._dynamo import lookup_backend

    settings = budget.settings()
    # What can't be weighed in a graph of ours is a device mesh, which has no activations.
    settings["unsafe_treat_script_objects_as_zero_size"] = True

    def compile_within(graph: torch.fx.GraphModule, example_inputs: Any) -> Any:
        with torch._functorch.config.patch(settings):
            return lookup_backend(backend)(graph, example_inputs)

    return compile_within


def _wrapped(block: ActivationWrapper) -> nn.Module:
    return block._checkpoint_wrapped_module  # pyrefly: ignore[bad-return]


def holds_fla(module: nn.Module) -> bool:
    """Whether `module` is, or holds, a module of flash-linear-attention or of a class derived from one."""
    return any(cls.__module__.startswith("fla.") for inner in module.modules() for cls in type(inner).__mro__)


def _enable_async_tp(parallel_dims: Any) -> None:
    """Let inductor overlap the TP group's collectives with matrix products."""
    import torch._inductor.config
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    with warnings.catch_warnings():  # deprecated, and still what async TP needs: pytorch #193027
        warnings.simplefilter("ignore", FutureWarning)
        enable_symm_mem_for_group(parallel_dims.get_mesh("tp").get_group().group_name)
    torch._inductor.config._micro_pipeline_tp = True
