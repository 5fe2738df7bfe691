"""torch.compile: Dynamo, AOTAutograd, Inductor.

The compiler takes two seconds to import, so each function imports what it returns.
"""

from collections.abc import Callable, Mapping, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn

from titanplans.torch_private.modules import compiled_call


def dynamo_config() -> Any:
    """Return Dynamo's config, which is global to the process."""
    import torch._dynamo.config

    return torch._dynamo.config


def functorch_config() -> Any:
    """Return AOTAutograd's config, which is global to the process."""
    import torch._functorch.config

    return torch._functorch.config


def inductor_config() -> Any:
    """Return Inductor's config, which is global to the process."""
    import torch._inductor.config

    return torch._inductor.config


def dynamo_errors() -> ModuleType:
    """Return the module of Dynamo's exceptions."""
    import torch._dynamo.exc

    return torch._dynamo.exc


ASYNC_TP_SETTING = "_micro_pipeline_tp"
"""Inductor's setting that switches async tensor parallelism on."""


FIRST_PASSES, LAST_PASSES = "post_grad_custom_pre_pass", "post_grad_custom_post_pass"
"""Inductor's settings for custom passes that run on each graph before and after its own post-grad passes."""


def graph_pass() -> Any:
    """Return the base class of custom passes for Inductor."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    return CustomGraphPass


def custom_passes(setting: str) -> tuple[Any, ...]:
    """Return the custom passes in Inductor's `setting` (`FIRST_PASSES` or `LAST_PASSES`)."""
    value = getattr(inductor_config(), setting)
    value = getattr(value, "combined_passes", value)
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def set_custom_passes(setting: str, passes: Sequence[Any]) -> None:
    """Set the custom passes that Inductor runs in order on each graph (`FIRST_PASSES` or `LAST_PASSES`)."""
    from torch._inductor import custom_graph_pass

    class CombinedPass(custom_graph_pass.CustomGraphPass):
        combined_passes = tuple(passes)

        def __call__(self, graph: torch.fx.Graph) -> None:
            for each in passes:
                each(graph)

        def uuid(self) -> Any:
            return None  # disables Inductor's cache of graphs

    accepts_several = hasattr(custom_graph_pass, "get_custom_graph_passes")  # torch 2.11 accepts only one
    value = (list(passes) if accepts_several else CombinedPass()) if passes else None
    setattr(inductor_config(), setting, value)


def enable_nested_graph_breaks() -> None:
    """Let Dynamo continue a graph after a break inside a called function.

    Do nothing in torch 2.11, which would then look up names in the wrong module.
    """
    if torch.__version__ >= "2.13":
        dynamo_config().nested_graph_breaks = True


def can_compile_checkpoints() -> bool:
    """Whether Dynamo can trace a checkpoint around collectives that have a gradient; torch 2.11 raises an error."""
    return torch.__version__ >= "2.13"


def zero_size_script_objects() -> dict[str, bool]:
    """Return the settings of AOTAutograd that let a device mesh that a graph saves count as no memory."""
    name = "unsafe_treat_script_objects_as_zero_size"
    return {name: True} if hasattr(functorch_config(), name) else {}  # graphs of torch 2.11 contain no meshes


def compiler_counters() -> Any:
    """Return the counters of Dynamo and Inductor: graphs, graph breaks by reason, cache hits."""
    from torch._dynamo.utils import counters

    return counters


def compilations() -> list[Any]:
    """Return the metrics of the latest compilations, oldest first."""
    from torch._dynamo.utils import get_compilation_metrics

    return get_compilation_metrics()


def limit_compilations(count: int | None) -> None:
    """Set the number of latest compilations whose metrics torch keeps. None: torch's default."""
    from torch._dynamo.utils import DEFAULT_COMPILATION_METRICS_LIMIT, set_compilation_metrics_limit

    set_compilation_metrics_limit(DEFAULT_COMPILATION_METRICS_LIMIT if count is None else count)


def set_guard_hook(hook: Callable[[bool], bool] | None) -> Callable[[bool], bool] | None:
    """Make Dynamo call `hook(found)` after each lookup of compiled code whose guards hold; return the previous hook."""
    from torch._C._dynamo.eval_frame import set_guard_complete_hook

    return set_guard_complete_hook(hook)  # pyrefly: ignore[bad-argument-type]


def is_compiled_model(model: nn.Module) -> bool:
    """Whether `model` is the result of `torch.compile(module)`, or was compiled in place by `module.compile()`."""
    from torch._dynamo import OptimizedModule

    return isinstance(model, OptimizedModule) or compiled_call(model) is not None


def backend_function(backend: Any) -> Callable[..., Any]:
    """Return the function of a torch.compile backend, which may be a name."""
    from torch._dynamo import lookup_backend

    return lookup_backend(backend)


def is_disabled(value: Any) -> bool:
    """Whether `value` is the result of `torch.compiler.disable`."""
    return getattr(value, "_torchdynamo_disable", False) is True


def enabled_function(value: Any) -> Any:
    """Return the function that `torch.compiler.disable` wrapped; None if `value` is not its result."""
    return getattr(value, "_torchdynamo_orig_callable", None)


def inductor_option_names() -> list[str]:
    """Return the names of Inductor's options."""
    return torch._inductor.list_options()


def check_inductor_options(options: dict[str, Any]) -> None:
    """Raise torch's RuntimeError if an option has a value of the wrong type."""
    torch._TorchCompileInductorWrapper(None, options, None)  # pyrefly: ignore[bad-argument-type]


def is_erased(node: torch.fx.Node) -> bool:
    """Whether a pass has removed `node` from its graph."""
    return node._erased


def inductor_stages() -> SimpleNamespace:
    """Return Inductor's functions up to and including its post-grad passes."""
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


def keep_order(graph: torch.fx.Graph, after: Mapping[torch.fx.Node, Sequence[torch.fx.Node]]) -> None:
    """Make Inductor run each key of `after` after the nodes in its value, however it schedules other nodes.

    Such a node becomes a call of Inductor's `control_deps`, which contains the operator; see `unordered_node`.
    """
    from torch._inductor.fx_passes.control_dependencies import preserve_node_ordering
    from torch.utils._ordered_set import OrderedSet

    preserve_node_ordering(graph, {node: OrderedSet(before) for node, before in after.items()})


def unordered_node(node: torch.fx.Node) -> torch.fx.Node:
    """Return the node of the operator that `keep_order` wrapped into `node`; any other node itself."""
    if getattr(node.target, "__name__", "") != "control_deps":
        return node
    subgraph = getattr(node.graph.owning_module, node.args[1].target)  # pyrefly: ignore
    return next(inner for inner in subgraph.graph.nodes if inner.op == "call_function")


def register_backend(name: str, backend: Callable[..., Any]) -> None:
    """Register `backend` with torch.compile as `name`, unless that name is registered already."""
    from torch._dynamo import list_backends, register_backend

    if name not in list_backends(exclude_tags=()):
        register_backend(backend, name=name)


def boxed(function: Any) -> Any:
    """Mark `function` as one that takes its arguments as a list, which it empties, so that AOTAutograd keeps none alive."""
    function._boxed_call = True
    return function


def lowered_operators() -> set[Any]:
    """Return the operators that Inductor lowers to its own code, without first writing their inputs to memory.

    The set has some matrix products and collectives, although Inductor calls these.
    """
    from torch._inductor.lowering import fallbacks, lowerings, needs_realized_inputs

    return set(lowerings) - set(fallbacks) - set(needs_realized_inputs)


class RealizationLimits(NamedTuple):
    """Beyond these numbers Inductor writes the result of an expression to memory, on a GPU."""

    reads: int
    """Tensors that an expression with several users reads."""
    accumulated_reads: int
    """Tensors that any expression reads."""
    operators: int
    """Operators of an expression with several users."""


def realization_limits() -> RealizationLimits:
    """Return Inductor's limits for expressions."""
    config = inductor_config()

    def limit(name: str) -> int:
        value = getattr(config, name)
        return getattr(config, f"_{name}_default") if value is None else value

    return RealizationLimits(
        config.realize_reads_threshold,
        limit("realize_acc_reads_threshold"),
        limit("realize_opcount_threshold"),
    )
