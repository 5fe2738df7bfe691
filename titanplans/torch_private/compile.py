"""torch.compile: dynamo, AOTAutograd, inductor.

The compiler takes two seconds to import: its names are functions that import it when they are called.
"""

from collections.abc import Callable, Mapping, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn

from titanplans.torch_private.modules import compiled_call


def dynamo_config() -> Any:
    """Return dynamo's settings, which are the process's."""
    import torch._dynamo.config

    return torch._dynamo.config


def functorch_config() -> Any:
    """Return AOTAutograd's settings, which are the process's."""
    import torch._functorch.config

    return torch._functorch.config


def inductor_config() -> Any:
    """Return inductor's settings, which are the process's."""
    import torch._inductor.config

    return torch._inductor.config


def dynamo_errors() -> ModuleType:
    """Return dynamo's exceptions."""
    import torch._dynamo.exc

    return torch._dynamo.exc


ASYNC_TP_SETTING = "_micro_pipeline_tp"
"""Inductor's setting that switches async tensor parallelism on."""


FIRST_PASSES, LAST_PASSES = "post_grad_custom_pre_pass", "post_grad_custom_post_pass"
"""Inductor's settings of passes of one's own over each graph, before and after its own."""


def graph_pass() -> Any:
    """Return the class of inductor's passes of one's own."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    return CustomGraphPass


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


def break_graphs_in_calls() -> None:
    """Let a graph that ends within a call go on there, which torch 2.11 does with the names of another module."""
    if torch.__version__ >= "2.13":
        dynamo_config().nested_graph_breaks = True


def compiles_checkpoints() -> bool:
    """Whether dynamo takes a checkpoint around collectives that have a gradient into a graph; torch 2.11 fails at it."""
    return torch.__version__ >= "2.13"


def opaque_objects_weigh_nothing() -> dict[str, bool]:
    """Return the settings of AOTAutograd under which a device mesh in a graph counts as no saved memory."""
    name = "unsafe_treat_script_objects_as_zero_size"
    return {name: True} if hasattr(functorch_config(), name) else {}  # torch 2.11 has none in its graphs


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


def is_erased(node: torch.fx.Node) -> bool:
    """Whether a pass has removed `node` from its graph."""
    return node._erased


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
