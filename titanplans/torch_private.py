"""Every private name of torch, torchtitan and torchao that titanplans relies on; nothing else touches one.

A private name may go with any release. tests/test_torch_private.py checks, for each name, that it does what titanplans
needs, and says what breaks without it. A name belongs here only if torch has no public way to the same thing. Methods
that a subclass of torch's overrides stay with the subclass, and operators (`torch.ops.…`) are reached by their
qualified names, which graphs and exported programs hold.

torch's compiler takes two seconds to import, so its names are functions that import it when called.

Everything but the Trainer runs on torch 2.11, too (docs/parallel.md). What differs is told here, by what there is where
that can be seen.
"""

import copy
import functools
import inspect
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from datetime import timedelta
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import _assert_async as assert_async
from torch import _foreach_mul_ as foreach_mul_
from torch import _foreach_norm as foreach_norm
from torch import nn
from torch._C import _disabled_torch_function_impl as disabled_torch_function
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._composable.replicate import DDP, replicate
from torch.distributed._local_tensor import (
    LocalIntNode,
    LocalTensor,
    LocalTensorMode,
    maybe_run_for_local_tensor,
)
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper, checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _abort_process_group as abort_process_group
from torch.distributed.distributed_c10d import _resolve_process_group as resolve_process_group
from torch.distributed.distributed_c10d import _set_pg_timeout as set_group_timeout
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import _api as dtensor_api
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import Placement
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed import multi_threaded_pg as threaded_groups
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

__all__ = [
    "DDP",
    "ActivationWrapper",
    "DTensorSpec",
    "DefaultAllGather",
    "FakeTensor",
    "LocalIntNode",
    "LocalTensor",
    "LocalTensorMode",
    "OpOverload",
    "StridedShard",
    "TorchDispatchMode",
    "abort_process_group",
    "assert_async",
    "checkpoint_wrapper",
    "clear_sharding_cache",
    "disabled_torch_function",
    "dtensor_api",
    "foreach_mul_",
    "foreach_norm",
    "maybe_run_for_local_tensor",
    "replicate",
    "resolve_process_group",
    "set_group_timeout",
    "threaded_groups",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
]

# Tensors, operators and the autograd graph


def clear_sharding_cache() -> None:
    """Forget how DTensor has sharded operators."""
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache  # imports the compiler

    _clear_sharding_prop_cache()


def version(tensor: torch.Tensor) -> int:
    """Return how often `tensor` has been written to in place; 0 of one made in inference mode, where nobody counts."""
    return 0 if tensor.is_inference() else tensor._version


ENGINE_HOLDS = 1 if torch.__version__ >= "2.13" else 2
"""How often autograd's engine holds the gradient that a backward is given."""


def users(gradient: torch.Tensor) -> int:
    """Return how many hold `gradient`, which the running backward was given, its engine counted as one.

    Of a view, also how many hold the tensor that it is a view of: as another gradient, they have its memory.
    """
    holders = gradient._use_count() - ENGINE_HOLDS + 1  # pyrefly: ignore[missing-attribute]
    base = gradient._base
    # Its view holds it, and `base` does.
    return holders if base is None else max(holders, base._use_count() - 1)  # pyrefly: ignore[missing-attribute]


def schema(operator: Any) -> Any:
    """Return an operator's schema (`name`, `arguments`); None for a higher-order operator, which has none."""
    return getattr(operator, "_schema", None)


def is_erased(node: torch.fx.Node) -> bool:
    """Whether a pass has removed `node` from its graph."""
    return node._erased


def sequence_number() -> int:
    """Return the number that the next autograd node of this thread gets."""
    return torch.autograd._get_sequence_nr()


def running_node() -> Any:
    """Return the autograd node whose backward runs on this thread, or None."""
    return torch._C._current_autograd_node()


def number_of_node(node: Any) -> int:
    """Return the sequence number that an autograd node got when the forward made it."""
    return node._sequence_nr()


def in_backward() -> bool:
    """Whether the autograd engine runs on this thread: a backward, or a recomputation in it."""
    return torch._C._current_graph_task_id() != -1


def fake_mode_is_on() -> bool:
    """Whether a FakeTensorMode is entered, under which nothing is computed."""
    return torch._guards.active_fake_mode() is not None


def dispatch_is_watched() -> bool:
    """Whether a mode sees every operation of this thread: a recorder, simulated ranks, fake tensors."""
    return torch._C._len_torch_dispatch_stack() > 0


def without_torch_function() -> AbstractContextManager[Any]:
    """Return the context in which `__torch_function__` and its modes are off."""
    return torch._C.DisableTorchFunction()


# DTensor, LocalTensor and meshes


def local_tensor(tensor: DTensor) -> torch.Tensor:
    """Return the local tensor itself: `to_local` would make a view, which records a gradient."""
    return tensor._local_tensor


def spec_of(tensor: DTensor) -> DTensorSpec:
    """Return the spec of `tensor`: its mesh, placements, shape, strides and dtype."""
    return tensor._spec


def spec_as(spec: DTensorSpec, placement: Placement) -> DTensorSpec:
    """Return the spec of a contiguous tensor that is otherwise as `spec`, of a 1-D mesh, with another placement."""
    stride, size = [], 1
    for length in reversed(spec.shape):
        stride.append(size)
        size *= max(length, 1)
    meta = spec.tensor_meta._replace(stride=tuple(reversed(stride)))  # type: ignore[union-attr]
    return DTensorSpec(spec.mesh, (placement,), tensor_meta=meta)


def with_spec(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """Return a DTensor of `local` and `spec` as they are: `from_local` makes and hashes a spec each time.

    Its `__init__` does nothing, in three times the time of its `__new__`: the compiler is kept out of it.
    """
    return DTensor.__new__(DTensor, local, spec, requires_grad=False)


def set_local_tensor(tensor: DTensor, local: torch.Tensor) -> None:
    """Replace the local tensor of `tensor`."""
    tensor._local_tensor = local


def simulated_ranks(tensor: LocalTensor) -> dict[int, torch.Tensor]:
    """Return what each simulated rank holds."""
    return tensor._local_tensors


def concatenate_meshes(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """Return one mesh with the dimensions of several, which are slices of one root mesh."""
    return DeviceMesh._concatenate(list(meshes))


def flatten_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Return a 1-D mesh called `name` over the ranks of `mesh`; makes a process group."""
    return mesh._flatten(name)


# Process groups


def backend_of(group: str, device: torch.device) -> Any:
    """Return what communicates between `device`s for the process group called `group`: NCCL's, gloo's, a fake one.

    The group's own methods look it up, too, by an operator, which in a step takes longer than the call.
    """
    return resolve_process_group(group)._get_backend(device)  # pyrefly: ignore[bad-argument-type]


def backend_all_gather(backend: Any, whole: torch.Tensor, x: torch.Tensor, options: Any) -> dist.Work | None:
    """Fill `whole` with the ranks' `x`; return the work, which NCCL leaves out of a synchronous call."""
    return backend._allgather_base(whole, x, options)


def backend_reduce_scatter(
    backend: Any, mine: torch.Tensor, x: torch.Tensor, options: Any
) -> dist.Work | None:
    """Fill `mine` with this rank's part of the sum of the ranks' `x`; return the work as `backend_all_gather`."""
    return backend._reduce_scatter_base(mine, x, options)


def group_device_types() -> list[str]:
    """Return the types of device that the default process group has a backend for."""
    return [device.type for device in dist.distributed_c10d._get_default_group()._device_types]


def default_store() -> dist.Store:
    """Return the store by which the ranks of the default process group have found each other."""
    return dist.distributed_c10d._get_default_store()


def default_timeout(device_type: str) -> timedelta | None:
    """Return the default group's timeout; None for a fake group, which has none."""
    backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device(device_type))
    options = getattr(backend, "options", None)
    return None if options is None else options._timeout


def enable_symmetric_memory(group: dist.ProcessGroup) -> None:
    """Allow symmetric memory on `group`: deprecated in torch 2.13, and async TP still needs it (pytorch #193027)."""
    import warnings

    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        enable_symm_mem_for_group(group.group_name)


def pretend_symmetric_memory(group_name: str) -> AbstractContextManager[None]:
    """Return the context in which inductor takes the group for one with symmetric memory."""
    from torch.distributed._symmetric_memory import _test_mode

    return _test_mode({group_name})


@contextmanager
def groups_of_threads() -> Iterator[None]:
    """Give every thread its own process groups, which are made without waiting for all of their ranks."""
    excepthook = sys.excepthook  # torch puts its own before it with each process group
    barrier = os.environ.pop("TORCH_DIST_INIT_BARRIER", None)
    torch._C._distributed_c10d._set_thread_isolation_mode(True)  # type: ignore[attr-defined]
    threads = torch._C._is_multithreading_enabled()
    # A build for CUDA, on a machine without a GPU, leaves the device guard of the first thread that makes fake tensors
    # to all others, also after that thread has ended. This one outlives the ranks.
    torch._C._ensureCUDADeviceGuardSet()
    world = threaded_groups._install_threaded_pg()
    if not hasattr(world, "comms"):  # torch 2.11, which then takes no group down; nothing is ever in it
        world.comms = []  # pyrefly: ignore[read-only]
    try:
        yield
    finally:
        threaded_groups._uninstall_threaded_pg()
        torch.autograd.set_multithreading_enabled(threads)  # torch 2.11 leaves it off
        torch._C._distributed_c10d._set_thread_isolation_mode(False)  # type: ignore[attr-defined]
        sys.excepthook = excepthook
        if barrier is not None:
            os.environ["TORCH_DIST_INIT_BARRIER"] = barrier


def refuse_plain(op: OpOverload, refusal: Callable[[], Exception]) -> None:
    """Let `op` of a DTensor and a plain tensor raise `refusal()`, where torch has a sentence of its own; all else stays.

    In the table by which torch's `loss_parallel` does more; what that puts there comes first.
    """

    def handle(op_call: OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        given = (x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor))
        if any(x.ndim and not isinstance(x, DTensor) for x in given):
            raise refusal()
        handlers = DTensor._op_dispatcher._custom_op_handlers
        handlers.pop(op_call, None)
        try:
            return op_call(*args, **kwargs)
        finally:
            handlers[op_call] = handle

    DTensor._op_dispatcher._custom_op_handlers.setdefault(op, handle)


@contextmanager
def shared_shardings() -> Iterator[None]:
    """Let threads that are ranks share how DTensor shards an operator, which it finds out by thread, in milliseconds."""
    propagator, known = DTensor._op_dispatcher.sharding_propagator, {}
    find = propagator.propagate_op_sharding_non_cached

    def without_mesh(value: Any, meshes: list[DeviceMesh]) -> Any:
        if isinstance(value, DTensorSpec):
            meshes.append(value.mesh)
            return value.placements, value.shard_order, value.tensor_meta
        if isinstance(value, list | tuple):
            return tuple(without_mesh(one, meshes) for one in value)
        return type(value), value

    def on(mesh: DeviceMesh, spec: DTensorSpec) -> DTensorSpec:
        there = copy.copy(spec)
        there.mesh = mesh
        return there

    def shared(schema: Any) -> Any:
        meshes: list[DeviceMesh] = []
        args = without_mesh([schema.args_schema, [*schema.kwargs_schema.items()]], meshes)
        if len({id(mesh) for mesh in meshes}) != 1 or meshes[0].ndim != 1:
            return find(schema)
        mesh, key = meshes[0], (schema.op, meshes[0].device_type, meshes[0].size(), args)
        if (found := known.get(key)) is not None:
            specs = tree_map_only(DTensorSpec, functools.partial(on, mesh), found.output_spec)
            return replace(found, output_spec=specs)
        found = find(schema)
        if found.redistribute_schema is None:
            known[key] = found
        return found

    propagator.propagate_op_sharding_non_cached = shared  # type: ignore[assignment]
    try:
        yield
    finally:
        del propagator.propagate_op_sharding_non_cached


def know_by_thread(mesh: DeviceMesh) -> None:
    """Let caches that are keyed by a mesh know this thread's `mesh` from another's, as torch does for its own threads."""
    mesh._thread_id, mesh._hash = threading.get_ident(), None


def fake_store() -> dist.Store:
    """Return the store of a fake process group."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


# Modules: recomputed, compiled, replicated

CHECKPOINTED = "_checkpoint_wrapped_module"
"""The name under which an ActivationWrapper holds its module."""


def checkpointed(wrapper: nn.Module) -> nn.Module:
    """Return the module inside of an ActivationWrapper."""
    return getattr(wrapper, CHECKPOINTED)


COMPILED_CALL = "_compiled_call_impl"
"""The attribute of a module that runs in place of its hooks and its forward when it is called."""


def compiled_call(module: nn.Module) -> Callable[..., Any] | None:
    """Return the compiled function that runs when `module` is called; None if it is not compiled in place."""
    return module._compiled_call_impl


def set_compiled_call(module: nn.Module, call: Callable[..., Any]) -> None:
    """Let `call` run when `module` is called, as `module.compile()` does with what torch.compile returns."""
    module._compiled_call_impl = call


def plain_call(module: nn.Module) -> Callable[..., Any]:
    """Return what runs when `module` is called and not compiled: its hooks and its forward."""
    return module._call_impl


def on_state_dict(module: nn.Module, hook: Callable[..., None]) -> None:
    """Let `hook(module, state, prefix, metadata)` change each state dict of `module` before it is returned."""
    module._register_state_dict_hook(hook)


def hooks_of(module: nn.Module) -> list[Any]:
    """Return the forward and backward hooks of `module`."""
    return [
        *module._forward_hooks.values(),
        *module._forward_pre_hooks.values(),
        *module._backward_hooks.values(),
    ]


def has_static_graph(model: DDP) -> bool:
    """Whether `model` was replicated with a static graph."""
    return replicate.state(model)._ddp.static_graph  # pyrefly: ignore[missing-attribute, bad-argument-type]


def start_ddp(model: DDP) -> None:
    """Build the reducer of `replicate` now, instead of in the first forward."""
    replicate.state(model).lazy_init()  # pyrefly: ignore[missing-attribute, bad-argument-type]


def hide_ddp_from_compiler() -> None:
    """Let dynamo forget which DDP runs: it would cut graphs where buckets end."""
    DistributedDataParallel._active_ddp_module = None


# FSDP2


def fsdp_group(module: FSDPModule) -> Any:
    """Return the FSDPParamGroup of `module`, or None if it manages no parameter."""
    return module._get_fsdp_state()._fsdp_param_group


def settle_fsdp_root(module: FSDPModule) -> bool:
    """Let FSDP2 settle which modules are in the model whose root is `module`; return whether `module` is a root."""
    state = module._get_fsdp_state()
    state._lazy_init()  # nothing if it was done
    return bool(state._is_root)


def left_in_forward(root: FSDPModule) -> bool:
    """Whether a forward of `root` was left by an exception."""
    return root._get_fsdp_state()._state_ctx.iter_forward_root is not None


def reset_forward(root: FSDPModule) -> None:
    """Let a forward of `root` that was left by an exception be as if it had not begun."""
    if hasattr(root, "reset_iter_state"):
        root.reset_iter_state()
        return
    state = root._get_fsdp_state()  # torch 2.11
    for each in state._state_ctx.all_states:
        each._modules_to_run_forward.clear()
        each._training_state = type(each._training_state).IDLE
        if (group := each._fsdp_param_group) is not None:
            group.wait_for_unshard()  # of a gather that nobody has waited for
            group._training_state = type(group._training_state).IDLE
            group.reshard()
    state._comm_ctx.all_gather_state = None
    state._state_ctx.iter_forward_root = None


def forget_forwards(group: Any) -> None:
    """Drop the forwards that `group` has recorded: the next backward would gather one unit for them."""
    group.comm_ctx.post_forward_order.clear()
    group._post_forward_indices.clear()


def drop_waiting_gradients(group: Any) -> None:
    """Drop the gradients that `group` holds outside of `.grad`, for a later micro batch."""
    group._partial_reduce_output = None
    for param in group.fsdp_params:
        param.unsharded_accumulated_grad = None
        whole = getattr(param, "_unsharded_param", None)  # there after the first gather
        if whole is not None:
            whole.grad = None


def before_reducing(group: Any, change: Callable[[list[torch.Tensor]], list[torch.Tensor]]) -> None:
    """Let `change` replace the unsharded gradients of `group`, all together, each time before FSDP2 reduces them."""
    reduce = group.post_backward

    def post_backward(*unused: Any) -> None:
        if group.reduce_grads:
            held = []
            for param in group.fsdp_params:
                param.accumulate_unsharded_grad_if_needed()
                whole = getattr(param, "_unsharded_param", None)  # there after the first gather
                if param.unsharded_accumulated_grad is not None:
                    held.append((param, "unsharded_accumulated_grad"))
                elif whole is not None and whole.grad is not None:
                    held.append((whole, "grad"))
            changed = change([getattr(owner, name) for owner, name in held])
            for (owner, name), grad in zip(held, changed, strict=True):
                setattr(owner, name, grad)
        reduce(*unused)

    group.post_backward = post_backward


def reshard_to(group: Any, mesh_info: Any) -> None:
    """Let the parameters of `group` reshard after the forward to a mesh that another group has made."""
    for holder in (group, *group.fsdp_params):
        holder.post_forward_mesh_info = mesh_info
    for param in group.fsdp_params:  # its sizes are those of the group's own mesh
        param._init_sharded_post_forward_param_metadata(torch.empty(param._orig_size, device="meta"))


@contextmanager
def replaced_in_fully_shard(
    chunk: Callable[[torch.Tensor, int, int], Sequence[torch.Tensor]],
    cached: Callable[[Callable[..., DeviceMesh]], Callable[..., DeviceMesh]],
) -> Iterator[None]:
    """Let `fully_shard` chunk parameters by `chunk`, and concatenate meshes by `cached(its own way)`, in the body."""
    before = _fsdp_param._chunk_with_empty, DeviceMesh._concatenate
    _fsdp_param._chunk_with_empty = chunk  # type: ignore[assignment]
    DeviceMesh._concatenate = staticmethod(cached(before[1]))  # type: ignore[method-assign]
    try:
        yield
    finally:
        _fsdp_param._chunk_with_empty = before[0]
        DeviceMesh._concatenate = staticmethod(before[1])  # type: ignore[method-assign]


# torch.compile


def dynamo_config() -> Any:
    """Return dynamo's settings, which are the process's."""
    import torch._dynamo.config

    return torch._dynamo.config


def break_graphs_in_calls() -> None:
    """Let a graph that ends within a call go on there, which torch 2.11 does with the names of another module."""
    if torch.__version__ >= "2.13":
        dynamo_config().nested_graph_breaks = True


def compiles_checkpoints() -> bool:
    """Whether dynamo takes a checkpoint around collectives that have a gradient into a graph; torch 2.11 fails at it."""
    return torch.__version__ >= "2.13"


def functorch_config() -> Any:
    """Return AOTAutograd's settings, which are the process's."""
    import torch._functorch.config

    return torch._functorch.config


def inductor_config() -> Any:
    """Return inductor's settings, which are the process's."""
    import torch._inductor.config

    return torch._inductor.config


ASYNC_TP_SETTING = "_micro_pipeline_tp"
"""Inductor's setting that switches async tensor parallelism on."""


def compile_at_most(function: Callable[..., Any], limit: int, **options: Any) -> Callable[..., Any]:
    """Return what `torch.compile(function, **options)` returns, which then compiles `limit` times at most."""
    if "recompile_limit" in inspect.signature(torch.compile).parameters:
        arguments: Any = {**options, "recompile_limit": limit}  # which torch's overloads leave out
        return torch.compile(function, **arguments)
    compiled = torch.compile(function, **options)

    @functools.wraps(compiled)
    def call(*args: Any, **kwargs: Any) -> Any:  # torch 2.11 knows a limit of the process only
        with dynamo_config().patch(recompile_limit=limit):
            return compiled(*args, **kwargs)

    return call


def compiler_counters() -> Any:
    """Return what dynamo and inductor count: graphs, graph breaks by reason, cache hits."""
    from torch._dynamo.utils import counters

    return counters


def compilations() -> list[Any]:
    """Return what the compiler noted of its newest compilations, oldest first."""
    from torch._dynamo.utils import get_compilation_metrics

    return get_compilation_metrics()


def remember_compilations(number: int | None) -> None:
    """Let the compiler remember its newest `number` compilations; None is torch's own number."""
    from torch._dynamo.utils import DEFAULT_COMPILATION_METRICS_LIMIT, set_compilation_metrics_limit

    set_compilation_metrics_limit(DEFAULT_COMPILATION_METRICS_LIMIT if number is None else number)


def set_guard_hook(hook: Callable[[bool], bool] | None) -> Callable[[bool], bool] | None:
    """Let dynamo call `hook(found)` where it has looked for compiled code that fits; return the hook before."""
    from torch._C._dynamo.eval_frame import set_guard_complete_hook

    return set_guard_complete_hook(hook)  # pyrefly: ignore[bad-argument-type]


def compile_id() -> str:
    """Return dynamo's number of the compilation that runs, such as "0/0"; "" outside of one."""
    return str(torch._guards.CompileContext.current_compile_id() or "")


def graph_pass() -> Any:
    """Return the class of inductor's passes of one's own."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    return CustomGraphPass


FIRST_PASSES, LAST_PASSES = "post_grad_custom_pre_pass", "post_grad_custom_post_pass"
"""Inductor's settings of passes of one's own over each graph, before and after its own."""


def own_passes(setting: str) -> tuple[Any, ...]:
    """Return the passes of one's own in a setting of inductor's."""
    held = getattr(inductor_config(), setting)
    held = getattr(held, "one_after_the_other", held)
    if held is None:
        return ()
    return tuple(held) if isinstance(held, list | tuple) else (held,)


def set_own_passes(setting: str, passes: Sequence[Any]) -> None:
    """Let inductor run `passes`, one after the other, over each graph, when `setting` says."""
    from torch._inductor import custom_graph_pass

    class One(custom_graph_pass.CustomGraphPass):
        one_after_the_other = tuple(passes)

        def __call__(self, graph: torch.fx.Graph) -> None:
            for each in passes:
                each(graph)

        def uuid(self) -> Any:
            return None  # inductor caches no graph

    takes_several = hasattr(custom_graph_pass, "get_custom_graph_passes")  # torch 2.11 takes one
    held = (list(passes) if takes_several else One()) if passes else None
    setattr(inductor_config(), setting, held)


def opaque_objects_weigh_nothing() -> dict[str, bool]:
    """Return the settings of AOTAutograd under which a device mesh in a graph counts as no saved memory."""
    name = "unsafe_treat_script_objects_as_zero_size"
    return {name: True} if hasattr(functorch_config(), name) else {}  # torch 2.11 has none in its graphs


def keep_order(graph: torch.fx.Graph, after: Mapping[torch.fx.Node, Sequence[torch.fx.Node]]) -> None:
    """Let inductor run each node of `after` behind the nodes that it maps to, in whatever order it schedules the rest.

    Such a node becomes a call of inductor's `control_deps`, which holds the operator; see `in_order`.
    """
    from torch._inductor.fx_passes.control_dependencies import preserve_node_ordering
    from torch.utils._ordered_set import OrderedSet

    preserve_node_ordering(graph, {node: OrderedSet(before) for node, before in after.items()})


def in_order(node: torch.fx.Node) -> torch.fx.Node:
    """Return the node with the operator that `keep_order` has put into `node`; any other node itself."""
    if getattr(node.target, "__name__", "") != "control_deps":
        return node
    held = getattr(node.graph.owning_module, node.args[1].target)  # pyrefly: ignore
    return next(inner for inner in held.graph.nodes if inner.op == "call_function")


def inductor_stages() -> SimpleNamespace:
    """Return the functions by which inductor takes a graph up to and through its last passes."""
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._inductor.compile_fx import compile_fx, fake_tensor_prop
    from torch._inductor.fx_passes.post_grad import post_grad_passes, view_to_reshape
    from torch._inductor.virtualized import V

    return SimpleNamespace(
        compile_fx=compile_fx,
        fake_tensor_prop=fake_tensor_prop,
        make_boxed_func=make_boxed_func,
        post_grad_passes=post_grad_passes,
        view_to_reshape=view_to_reshape,
        V=V,
    )


def dynamo_errors() -> ModuleType:
    """Return dynamo's exceptions."""
    import torch._dynamo.exc

    return torch._dynamo.exc


def is_compiled_whole(model: nn.Module) -> bool:
    """Whether `model` is what `torch.compile(module)` returns, or was compiled in place."""
    from torch._dynamo import OptimizedModule

    return isinstance(model, OptimizedModule) or compiled_call(model) is not None


def backend_function(backend: Any) -> Callable[..., Any]:
    """Return the function of a torch.compile backend that may be given by name."""
    from torch._dynamo import lookup_backend

    return lookup_backend(backend)


def is_disabled(value: Any) -> bool:
    """Whether `value` is a function that `torch.compiler.disable` keeps out of every graph."""
    return getattr(value, "_torchdynamo_disable", False) is True


def enabled_function(value: Any) -> Any:
    """Return the function that `torch.compiler.disable` wrapped; None if `value` is not its result."""
    return getattr(value, "_torchdynamo_orig_callable", None)


def inductor_option_names() -> list[str]:
    """Return the names of inductor's options."""
    return torch._inductor.list_options()


def check_inductor_options(options: dict[str, Any]) -> None:
    """Raise torch's RuntimeError if a value is not of its option's type."""
    torch._TorchCompileInductorWrapper(None, options, None)  # pyrefly: ignore[bad-argument-type]


# torchao


def gains_by_float8(recipe: str) -> Callable[[nn.Module, str], bool]:
    """Return torchao's filter: whether a Linear is large enough to gain by float8, by torchao's figures."""
    from torchao.float8 import _auto_filter_for_recipe

    return _auto_filter_for_recipe(recipe, [])


def is_float8_gathered(weight: Any) -> bool:
    """Whether `weight` is sharded and torchao casts it when FSDP2 gathers it."""
    return isinstance(weight, DTensor) and hasattr(weight._local_tensor, "_precomputed_scale")


def stored_weight(local: Any) -> torch.Tensor:
    """Return the high-precision tensor inside of the local tensor of a weight that is gathered in float8."""
    return local._tensor


def set_gather_scale(weight: Any, scale: torch.Tensor) -> None:
    """Give the scale with which a weight is cast when it is gathered in float8."""
    weight._local_tensor._precomputed_scale = scale


def float8_data(tensor: Any) -> torch.Tensor:
    """Return the float8 numbers of torchao's Float8TrainingTensor."""
    return tensor._data


def float8_scale(tensor: Any) -> torch.Tensor:
    """Return the scale of torchao's Float8TrainingTensor."""
    return tensor._scale


def cast_to_float8() -> Any:
    """Return torchao's autograd function that casts a tensor with a scale that is known."""
    from torchao.float8.float8_training_tensor import _ToFloat8ConstrFunc

    return _ToFloat8ConstrFunc
