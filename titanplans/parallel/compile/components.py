"""Compile the blocks of a model, the loss and the optimizer's step; compilation happens at their first call."""

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import nn

from titanplans.config import Compile
from titanplans.errors import ParallelError
from titanplans.parallel.activation_checkpoint import Kept, memory_budget
from titanplans.parallel.compile import async_tp
from titanplans.parallel.compile.graph_breaks import (
    calls_kernels,
    end_graphs_at_kernels,
    end_graphs_where_tokens_leave,
    sends_tokens,
)
from titanplans.parallel.compile.limits import (
    RECOMPILATIONS,
    check_switched_on,
    compile_at_most,
    count_kinds,
    limited,
)
from titanplans.parallel.optimizers.muon import Muon
from titanplans.split.decoder import find_decoder
from titanplans.split.parameters.loaded_state import check_optimizer_state
from titanplans.split.state import border_of_model
from titanplans.torch_private.compile import (
    backend_function,
    can_compile_checkpoints,
    check_inductor_options,
    dynamo_config,
    functorch_config,
    inductor_option_names,
    zero_size_script_objects,
)
from titanplans.torch_private.modules import (
    ActivationWrapper,
    checkpointed,
    plain_call,
    set_compiled_call,
)

F = TypeVar("F", bound=Callable[..., Any])


def apply_compile(
    model: nn.Module, compile_config: Compile, parallel_dims: Any, *, async_tensor_parallel: bool = False
) -> None:
    """Compile each block in place; names and parameters do not change.

    Equal blocks share compiled code, except those that are both split by tensor parallelism and recomputed.

    By default a block must compile to one graph, else its first call raises an error. Blocks with graph breaks are allowed
    in three cases: their routers' logits are recorded (`output_router_logits`), which a graph can't do; they have modules of
    flash-linear-attention, whose kernels are excluded from graphs; or they send tokens to other ranks. Such a block is
    compiled inside its checkpoint: a recomputation then runs the compiled graphs again, and can't keep operators' outputs.
    It is also an error if a kind of block is compiled more than `RECOMPILATIONS` times.

    Args:
        model: the model, with activation checkpointing applied.
        compile_config: the options of torch.compile. If `fullgraph` is None, the rule above holds.
        parallel_dims: has the mesh "tp", for async tensor parallelism.
        async_tensor_parallel: overlap the collectives of the TP group with matrix products.

    Raises:
        ParallelError: an option can't be honoured.
    """
    options = compile_options(compile_config)
    fullgraph, backend = compile_config.fullgraph, options.pop("backend")
    blocks = _blocks(model)
    for name, block in blocks:
        if any(isinstance(module, Kept) for module in block.modules()):
            raise ParallelError(
                "a mixer that is kept from recomputation can't be in a compiled block: switch compile off, or recompute the "
                "MLP only"
            )
        if fullgraph and sends_tokens(block):
            raise ParallelError(
                f"compile.fullgraph = true, but {name} sends tokens to other ranks, in modules outside of graphs: leave "
                "fullgraph out"
            )
        if fullgraph and calls_kernels(block):
            raise ParallelError(
                f"compile.fullgraph = true, but {name} calls kernels of flash-linear-attention, which take "
                "themselves out of every graph: leave fullgraph out"
            )
    records_routers = _records_routers(model)
    if fullgraph and records_routers:
        raise ParallelError(
            "compile.fullgraph = true, but with output_router_logits = true the logits of routers are recorded, which ends "
            "a graph: leave fullgraph out"
        )
    if async_tensor_parallel:
        async_tp.enable(model, parallel_dims)
    # Without this setting dynamo refuses Python side effects in a checkpointed block, since the recomputation would repeat
    # them. The setting holds for the process, and torch uses its value at the time when a block first runs.
    dynamo_config().skip_fwd_side_effects_in_bwd_under_checkpoint = True
    # All blocks have the same memory budget, so one backend object is made for all of them: blocks with different backend
    # objects do not share compiled code.
    budget = next(filter(None, (memory_budget(block) for _, block in blocks)), None)
    within_budget = backend if budget is None else _budgeted(backend, budget)
    border = border_of_model(model)
    # The guards of a compiled checkpoint compare ids of the hooks inside it. Each block that tensor parallelism splits has
    # hooks of its own, so such blocks do not share compiled code.
    shares = border is None or not any(isinstance(block, ActivationWrapper) for _, block in blocks)
    limit = RECOMPILATIONS * (count_kinds(block for _, block in blocks) if shares else len(blocks))
    for name, block in blocks:
        has_breaks = records_routers or calls_kernels(block) or sends_tokens(block)
        one_graph = not has_breaks if fullgraph is None else fullgraph
        if (
            one_graph
            and isinstance(block, ActivationWrapper)
            and border is not None
            and not can_compile_checkpoints()
        ):
            raise ParallelError(
                f"activation checkpointing in a compiled block that tensor parallelism splits ({name}) needs torch 2.13, "
                f"and this is torch {torch.__version__}: switch one of the two off"
            )
        # torch compiles a checkpoint only as one graph: with graph breaks, compile the module inside the checkpoint.
        target = block if one_graph or not isinstance(block, ActivationWrapper) else checkpointed(block)
        if not one_graph and calls_kernels(block):
            end_graphs_at_kernels(block)
        if sends_tokens(block):
            end_graphs_where_tokens_leave(block)
        chosen = backend if memory_budget(block) is None else within_budget
        _compile_module(target, name, limit, backend=chosen, fullgraph=one_graph, **options)


def compile_loss(fn: F, compile_config: Compile) -> F:
    """Return the loss function `fn` compiled; a module is compiled in place and returned. `fullgraph` None is False."""
    options = compile_options(compile_config) | {"fullgraph": bool(compile_config.fullgraph)}
    if isinstance(fn, nn.Module):
        _compile_module(fn, "the loss", RECOMPILATIONS, **options)
        return fn
    return _compile(fn, "the loss", RECOMPILATIONS, **options)


def compile_optimizer(optimizer: torch.optim.Optimizer, compile_config: Compile) -> torch.optim.Optimizer:
    """Compile the step of `optimizer` in place and return it; options as for `compile_loss`.

    Learning rates become tensors: a float would be a constant of the compiled step, and every change of the learning rate
    would compile the step again. Schedulers may be attached before or after this call.

    Raises:
        ParallelError: the optimizer is fused, is Muon, or is foreach with capturable=False, which takes no tensor as lr.
    """
    if isinstance(optimizer, Muon):
        raise ParallelError(
            "Muon's step communicates between its products, and is not compiled: leave 'optimizer' out of compile.components"
        )
    options = compile_options(compile_config) | {"fullgraph": bool(compile_config.fullgraph)}
    for group in optimizer.param_groups:
        if group.get("fused"):
            raise ParallelError(
                "a fused optimizer step is one kernel and leaves nothing to compile: remove 'optimizer' from "
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
    compiled = _compile(optimizer.step, "the optimizer's step", RECOMPILATIONS, **options)

    @functools.wraps(optimizer.step)
    def step(_: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        check_optimizer_state(optimizer)
        return compiled(*args, **kwargs)

    # A bound method, since schedulers wrap `optimizer.step.__func__`.
    optimizer.step = MethodType(step, optimizer)  # pyrefly: ignore[bad-assignment]
    return optimizer


def _compile_module(module: nn.Module, what: str, limit: int, **options: Any) -> None:
    """Compile `module` in place, as `module.compile` does."""
    set_compiled_call(module, _compile(plain_call(module), what, limit, **options))


def _compile(fn: F, what: str, limit: int, **options: Any) -> F:
    return limited(compile_at_most(fn, limit, **options), what, limit)  # pyrefly: ignore[bad-return]


def compile_options(compile_config: Compile) -> dict[str, Any]:
    """Return the arguments of torch.compile except `fullgraph`.

    Raises:
        OptionError: the backend, or a setting of inductor, does not exist, or the setting's value has the wrong type.
        ParallelError: torch.compile is disabled by the environment.
    """
    check_switched_on()
    options: dict[str, Any] = {"backend": compile_config.backend}
    for name in ("mode", "dynamic", "options"):
        value = getattr(compile_config, name)
        if value is not None:
            options[name] = value
    backend = options["backend"]
    if isinstance(backend, str) and backend not in torch.compiler.list_backends(exclude_tags=()):
        usual = ", ".join(torch.compiler.list_backends())
        raise compile_config.error("backend", f"torch has {usual}, and some for debugging")
    if "options" in options:
        unknown = [key for key in options["options"] if key.replace("-", "_") not in inductor_option_names()]
        if unknown:
            raise compile_config.error(
                "options", f"inductor does not know {unknown[0]!r}: torch._inductor.list_options() has all"
            )
        try:
            check_inductor_options(options["options"])
        except RuntimeError as error:
            raise compile_config.error("options", str(error)) from error
    return options


def one_graph_a_block(model: nn.Module) -> bool:
    """Whether every block of `model` can be compiled to one graph."""
    return not (_records_routers(model) or any(calls_kernels(block) for _, block in _blocks(model)))


def _records_routers(model: nn.Module) -> bool:
    return getattr(getattr(model, "config", None), "output_router_logits", False)


def _blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the blocks of the decoder and of vision towers, with their names."""
    lists = find_decoder(model).block_lists
    return [(name, model.get_submodule(name)) for names in lists for name in names]


def _budgeted(backend: Any, budget: dict[str, Any]) -> Callable[..., Any]:
    """Return a backend that runs `backend` with AOTAutograd's settings in `budget`, which are restored afterwards."""
    # The only objects of unknown size in these graphs are device meshes. They are not activations, so their size counts as
    # 0.
    settings = budget | zero_size_script_objects()

    def compile_within(graph: torch.fx.GraphModule, example_inputs: Any) -> Any:
        with functorch_config().patch(settings):
            return backend_function(backend)(graph, example_inputs)

    return compile_within
