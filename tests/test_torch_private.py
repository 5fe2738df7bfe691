"""Each private name in titanplans/torch_private.py does what titanplans needs; nothing else touches a private name.

A check says what breaks in titanplans without the names that it checks.
"""

import ast
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor

from titanplans import torch_private as private
from titanplans.parallel import process_group

ROOT = Path(__file__).parents[1]
OTHERS = {
    "_no_weight_decay",
    "_no_split_modules",
    *("_attn_implementation", "_keys_to_ignore_on_load_unexpected"),
    *("_initialize_weights", "_get_dtype_plan"),
    "_megatron_fsdp_model",
    "_reset_parameters",
    *("_run_exitfuncs", "_actions"),
    "_generate_tables",
    *("_readout_basis", "_rotate_atom", "_rotate_modal_pos", "_rotate_modal_neg"),
    "_get_D",
}
"""Private names of transformers, fla, megatron-fsdp, atexit and argparse, a method that modules of torch's have, and one
that authors of data sets override in a builder of `datasets`."""
PUBLIC_TABLES = {"_parameters", "_modules", "_buffers", "_asdict", "_replace", "_fields"}
"""nn.Module's tables, which it documents for those who walk modules, and the methods of named tuples."""
LIBRARIES = ("torch", "torchtitan", "torchao")

CHECKS = []


def needs(*names, without):
    """Mark a check of `names`; `without` says what breaks when it fails."""

    def mark(check):
        CHECKS.append((check, names, without))
        return check

    return mark


@pytest.fixture(scope="module", autouse=True)
def group():
    with process_group("cpu", timeout=timedelta(minutes=7)):
        yield


# Tensors, operators and the autograd graph


@needs(
    "version", without="a mixer's output that is changed in place would be recomputed from the changed values"
)
def check_version():
    tensor = torch.zeros(2)
    before = private.version(tensor)
    tensor.add_(1)
    assert private.version(tensor) == before + 1


@needs(
    "schema",
    "OpOverload",
    without="graphs can't be searched for collectives, nor kept attention for its dropout",
)
def check_schema():
    operator = torch.ops.aten.add.Tensor
    assert isinstance(operator, private.OpOverload)
    assert private.schema(operator).name == "aten::add"
    assert [argument.name for argument in private.schema(operator).arguments][:2] == ["self", "other"]
    assert private.schema(torch.ops.higher_order.flex_attention) is None


@needs("is_erased", without="async-tp can't tell which collectives inductor fused")
def check_is_erased():
    graph = torch.fx.Graph()
    node = graph.placeholder("x")
    assert not private.is_erased(node)
    graph.erase_node(node)
    assert private.is_erased(node)


@needs(
    "sequence_number",
    "number_of_node",
    "running_node",
    "in_backward",
    without="collectives of the backward are booked on no module, and a recomputation does not find its forward",
)
def check_autograd():
    seen = []

    class Watch(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            seen.append((private.in_backward(), private.number_of_node(private.running_node())))
            return grad

    before = private.sequence_number()
    Watch.apply(torch.ones(1, requires_grad=True)).sum().backward()
    assert not private.in_backward()
    assert private.running_node() is None
    assert seen == [(True, before)]


@needs("without_torch_function", without="the float64 proof of float8 would widen the scales, too")
def check_without_torch_function():
    with torch.device("meta"), private.without_torch_function():
        assert torch.zeros(1).device.type == "cpu"


@needs("disabled_torch_function", without="each operation on a weight of a split model goes through Python")
def check_disabled_torch_function():
    class Ours(torch.Tensor):
        __torch_function__ = private.disabled_torch_function

    assert type(torch.zeros(1).as_subclass(Ours) + 1) is torch.Tensor


@needs(
    "dispatch_is_watched",
    without="what a recorder counts in a step has the checks of the first forward in it",
)
def check_dispatch_is_watched():
    assert not private.dispatch_is_watched()
    with FakeTensorMode():
        assert private.dispatch_is_watched()


@needs("assert_async", without="a label outside of the vocabulary gives a wrong loss")
def check_assert_async():
    with pytest.raises(RuntimeError, match="wrong label"):
        private.assert_async(torch.tensor(False), "wrong label")


@needs("foreach_mul_", "foreach_norm", without="clipping takes one kernel a parameter")
def check_foreach():
    tensors = [torch.ones(4), torch.ones(9)]
    assert torch.stack(private.foreach_norm(tensors, 2, dtype=torch.float32)).tolist() == [2.0, 3.0]
    private.foreach_mul_(tensors, torch.tensor(3.0))
    assert tensors[1].eq(3).all()


@needs(
    "FakeTensor",
    "fake_mode_is_on",
    without="collectives of the compiler's tracing are counted, and those of sizes that no memory holds can't be",
)
def check_fake_tensor():
    assert not private.fake_mode_is_on()
    with FakeTensorMode():
        assert private.fake_mode_is_on()
        assert isinstance(torch.zeros(1), private.FakeTensor)


@needs("TorchDispatchMode", without="collectives of a step can't be recorded")
def check_dispatch_mode():
    seen = []

    class Mode(private.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    with Mode():
        torch.zeros(1) + 1
    assert "aten.add.Tensor" in seen


@needs(
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    without="outputs that are dicts and dataclasses are not looked into",
)
def check_trees():
    assert private.tree_leaves({"a": (1, [2])}) == [1, 2]
    assert private.tree_map(lambda a, b: a + b, (1, [2]), (3, [4])) == (4, [6])
    assert private.tree_map_only(int, lambda n: n + 1, {"a": (1, "b")}) == {"a": (2, "b")}


# DTensor and meshes


@needs(
    "DTensorSpec",
    "spec_as",
    "spec_of",
    "with_spec",
    without="each parameter of a split model costs three times the host's time in a step",
)
def check_specs():
    tensor = distribute_tensor(torch.zeros(2), init_device_mesh("cpu", (1,)), [Replicate()])
    spec = private.spec_as(private.spec_of(tensor), Partial())
    assert isinstance(spec, private.DTensorSpec)
    made = private.with_spec(local := torch.ones(2), spec)
    assert made.placements == (Partial(),)
    assert made.shape == (2,)
    assert private.local_tensor(made) is local
    assert not made.requires_grad


@needs(
    *("users", "ENGINE_HOLDS"),
    without="two parameters whose gradient autograd has once share its memory, and clipping scales it twice",
)
def check_users():
    seen = []

    class Watch(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            seen.append(private.users(grad))
            return grad.clone()

    one, other = (torch.ones(2, requires_grad=True) for _ in range(2))
    (Watch.apply(one) * 2).sum().backward()
    ((Watch.apply(one) + Watch.apply(other)) * 2).sum().backward()
    assert seen == [1, 2, 1]


@needs("local_tensor", without="each read of a parameter records a gradient")
def check_local_tensor():
    tensor = distribute_tensor(torch.ones(2), init_device_mesh("cpu", (1,)), [Replicate()])
    assert private.local_tensor(tensor).eq(1).all()


@needs(
    "StridedShard",
    without="the rows of a parameter that TP and FSDP both shard are initialised in the wrong order",
)
def check_strided_shard():
    assert private.StridedShard(0, split_factor=2).split_factor == 2


@needs("clear_sharding_cache", without="a second world of fake ranks takes the first one's process groups")
def check_clear_sharding_cache():
    private.clear_sharding_cache()


@needs("concatenate_meshes", "flatten_mesh", without="FSDP and tensor parallelism have no mesh in common")
def check_meshes():
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("a", "b"))
    assert private.concatenate_meshes([mesh["a"], mesh["b"]]).mesh_dim_names == ("a", "b")
    flat = private.flatten_mesh(mesh, "ab")
    assert flat.mesh_dim_names == ("ab",)
    assert flat.size() == 1


# Process groups


@needs(
    "group_device_types",
    without="a group without a backend for the device is noticed at the first collective",
)
def check_group_device_types():
    assert "cpu" in private.group_device_types()


@needs(
    "default_timeout", "set_group_timeout", without="groups of a mesh wait as long as torch's default says"
)
def check_timeouts():
    assert private.default_timeout("cpu") == timedelta(minutes=7)
    group = dist.new_group([0])
    private.set_group_timeout(timedelta(minutes=3), group)
    assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(minutes=3)


@needs("default_store", without="ranks that were asked to end can't agree on the step after which they do")
def check_default_store():
    assert private.default_store().compare_set("titanplans/test", "", "3") == b"3"
    assert private.default_store().compare_set("titanplans/test", "", "4") == b"3"
    assert private.default_store().check(["titanplans/test"])


@needs("resolve_process_group", without="the size of a collective's group is unknown, and with it the bytes")
def check_resolve_process_group():
    assert private.resolve_process_group(dist.group.WORLD.group_name).size() == 1


@needs(
    "backend_of",
    "backend_all_gather",
    "backend_reduce_scatter",
    without="each border of a split model costs the host twice as much",
)
def check_backends():
    # What they do over several ranks is in tests/split/test_collectives.py.
    x = torch.arange(4.0)
    backend = private.backend_of(dist.group.WORLD.group_name, x.device)
    for call, options in (
        (private.backend_all_gather, dist.distributed_c10d.AllgatherOptions()),
        (private.backend_reduce_scatter, dist.ReduceScatterOptions()),
    ):
        came = torch.empty(4)
        call(backend, came, x, options).wait()
        assert torch.equal(came, x), call


@needs(
    "threaded_groups",
    "groups_of_threads",
    "know_by_thread",
    without="the ranks of a proof can't be threads of one process",
)
def check_groups_of_threads():
    def look(mesh):
        before = hash(mesh)
        private.know_by_thread(mesh)
        return dist.is_initialized(), before != hash(mesh)

    mesh = init_device_mesh("cpu", (1,))
    with private.groups_of_threads(), ThreadPoolExecutor(1) as pool:
        assert pool.submit(look, mesh).result() == (False, True)
    assert dist.is_initialized()
    assert issubclass(private.threaded_groups.ProcessLocalGroup, dist.ProcessGroup)


@needs(
    "shared_shardings", without="each rank of a proof finds out again what DTensor does, a tenth of its time"
)
def check_shared_shardings():
    mesh, other = (DeviceMesh("cpu", [0]) for _ in range(2))
    private.know_by_thread(other)
    propagator = DTensor._op_dispatcher.sharding_propagator
    with private.shared_shardings():
        assert "propagate_op_sharding_non_cached" in vars(propagator)
        for one in (mesh, other):
            tensor = DTensor.from_local(torch.ones(3, 5), one, [Replicate()])
            assert (tensor + tensor).device_mesh is one
            assert torch.equal((tensor + tensor).to_local(), torch.full((3, 5), 2.0))
    assert "propagate_op_sharding_non_cached" not in vars(propagator)


@needs("refuse_plain", without="torch's cross entropy of sharded logits says nothing of ours")
def check_refuse_plain():
    op, handlers = torch.ops.aten.hypot.default, DTensor._op_dispatcher._custom_op_handlers
    private.refuse_plain(op, lambda: KeyError("ours"))
    try:
        plain = torch.full((2,), 3.0)
        tensor = DTensor.from_local(plain, DeviceMesh("cpu", [0]), [Replicate()])
        for _ in range(2):
            assert torch.equal(torch.hypot(tensor, tensor).to_local(), plain * 2**0.5)
            with pytest.raises(KeyError, match="ours"):
                torch.hypot(tensor, plain)
    finally:
        del handlers[op]


@needs("abort_process_group", without="after an exception a rank waits for others that will not come")
def check_abort_process_group():
    # What it does to other ranks is in parallel/test_process_group.py.
    assert callable(private.abort_process_group)


@needs(
    "enable_symmetric_memory",
    "pretend_symmetric_memory",
    without="async tensor parallelism fuses nothing, and can't be tried without a GPU",
)
def check_symmetric_memory():
    from torch.distributed._symmetric_memory import is_symm_mem_enabled_for_group

    name = dist.group.WORLD.group_name
    with private.pretend_symmetric_memory("another"):
        assert is_symm_mem_enabled_for_group("another")
        assert not is_symm_mem_enabled_for_group(name)
    private.enable_symmetric_memory(dist.group.WORLD)
    assert is_symm_mem_enabled_for_group(name)


@needs("fake_store", without="a plan can't be applied for more ranks than there are processes")
def check_fake_store():
    assert isinstance(private.fake_store(), dist.Store)


# Modules: recomputed, compiled, replicated


@needs(
    "ActivationWrapper",
    "checkpoint_wrapper",
    "checkpointed",
    "CHECKPOINTED",
    without="modules can't be recomputed under their own names",
)
def check_checkpoint_wrapper():
    linear = nn.Linear(2, 2)
    wrapped = private.checkpoint_wrapper(linear, preserve_rng_state=True, early_stop=False)
    assert isinstance(wrapped, private.ActivationWrapper)
    assert private.checkpointed(wrapped) is linear
    assert set(wrapped.state_dict()) == {"weight", "bias"}
    assert [name for name, _ in wrapped.named_modules()] == ["", private.CHECKPOINTED]


@needs(
    "compiled_call",
    "set_compiled_call",
    "plain_call",
    "COMPILED_CALL",
    without="blocks are not compiled in place, nor seen to be called",
)
def check_compiled_call():
    linear = nn.Linear(2, 2)
    assert private.compiled_call(linear) is None
    linear.register_forward_hook(lambda module, args, output: output * 0)
    assert private.plain_call(linear)(torch.ones(2)).eq(0).all()
    private.set_compiled_call(linear, lambda x: "compiled")
    assert linear(torch.ones(2)) == "compiled"
    assert private.compiled_call(linear) is getattr(linear, private.COMPILED_CALL)


@needs("on_state_dict", without="checkpoints hold torchao's weights, which only torchao reads")
def check_on_state_dict():
    linear = nn.Linear(2, 2)
    private.on_state_dict(linear, lambda module, state, prefix, metadata: state.clear())
    assert not linear.state_dict()


@needs("hooks_of", without="converting to float8 drops hooks")
def check_hooks_of():
    linear = nn.Linear(2, 2)
    assert not private.hooks_of(linear)
    linear.register_forward_hook(print)
    linear.register_forward_pre_hook(print)
    linear.register_full_backward_hook(print)
    assert len(private.hooks_of(linear)) == 3


@needs("DDP", "replicate", "start_ddp", "has_static_graph", without="DDP can't replicate a model in place")
def check_replicate():
    linear = nn.Linear(2, 2)
    private.replicate(linear, static_graph=True)
    private.start_ddp(linear)
    assert isinstance(linear, private.DDP)
    assert isinstance(linear, nn.Linear)
    assert private.has_static_graph(linear)


@needs("hide_ddp_from_compiler", without="dynamo cuts the graph of a block where DDP's buckets end")
def check_hide_ddp():
    assert hasattr(nn.parallel.DistributedDataParallel, "_active_ddp_module")
    private.hide_ddp_from_compiler()


# FSDP2


def sharded():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    mesh = init_device_mesh("cpu", (1,))
    for module in (*model, model):
        fully_shard(module, mesh=mesh)
    return model


@needs("fsdp_group", "settle_fsdp_root", without="a part of a sharded model is taken for the model")
def check_fsdp_state():
    model = sharded()
    assert private.fsdp_group(model) is None
    assert private.fsdp_group(model[0]) is not None
    assert private.settle_fsdp_root(model)
    assert not private.settle_fsdp_root(model[0])
    assert private.fsdp_group(model[1]).mesh_info.mesh.ndim == 1
    assert private.fsdp_group(model[1]).post_forward_mesh_info is not None


@needs(
    "left_in_forward",
    "forget_forwards",
    "reset_forward",
    without="a forward that failed in an evaluation spoils the next step",
)
def check_left_in_forward():
    model = sharded()
    model(torch.ones(1, 2))
    group = private.fsdp_group(model[0])
    assert group.comm_ctx.post_forward_order
    assert not private.left_in_forward(model)
    private.forget_forwards(group)
    assert not group.comm_ctx.post_forward_order
    assert not group._post_forward_indices
    with pytest.raises(RuntimeError):
        model(torch.ones(1, 3))
    assert private.left_in_forward(model)
    private.reset_forward(model)
    assert not private.left_in_forward(model)
    model(torch.ones(1, 2)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@needs("drop_waiting_gradients", without="a step that was given up is added to the next one")
def check_drop_waiting_gradients():
    model = sharded()
    model.set_requires_gradient_sync(False)
    model(torch.ones(1, 2)).sum().backward()
    group = private.fsdp_group(model[0])
    assert all(
        param.unsharded_param.grad is not None or param.unsharded_accumulated_grad is not None
        for param in group.fsdp_params
    )
    private.drop_waiting_gradients(group)
    assert all(
        param.unsharded_param.grad is None and param.unsharded_accumulated_grad is None
        for param in group.fsdp_params
    )


@needs("before_reducing", without="FSDP2 sums the Partial gradients of a unit one by one")
def check_before_reducing():
    torch.manual_seed(0)
    model, seen = sharded(), []

    def doubled(grads):
        seen.append(len(grads))
        return [2 * grad for grad in grads]

    group = private.fsdp_group(model[0])
    private.before_reducing(group, doubled)
    for sync in (False, True):
        model.set_requires_gradient_sync(sync)
        model(torch.ones(1, 2)).sum().backward()
        assert bool(seen) == sync
    assert {count for count in seen if count} == {len(group.fsdp_params)}
    changed = [parameter.grad.to_local() for parameter in model[0].parameters()]
    torch.manual_seed(0)
    plain = sharded()
    for _ in range(2):
        plain(torch.ones(1, 2)).sum().backward()
    for ours, theirs in zip(changed, plain[0].parameters(), strict=True):
        torch.testing.assert_close(ours, 2 * theirs.grad.to_local())


@needs("reshard_to", without="resharding to some ranks makes two process groups for each unit")
def check_reshard_to():
    model = sharded()
    first, second = private.fsdp_group(model[0]), private.fsdp_group(model[1])
    private.reshard_to(second, first.post_forward_mesh_info)
    assert second.fsdp_params[0].post_forward_mesh_info is first.post_forward_mesh_info
    model(torch.ones(1, 2)).sum().backward()


@needs("replaced_in_fully_shard", without="FSDP2's construction is linear in the number of ranks")
def check_replaced_in_fully_shard():
    chunked = []

    def chunk(tensor, number, dim):
        chunked.append(tuple(tensor.shape))
        return torch.chunk(tensor, number, dim)

    with private.replaced_in_fully_shard(chunk, lambda concatenate: concatenate):
        sharded()
    assert set(chunked) == {(2,), (2, 2)}
    chunked.clear()
    sharded()
    assert not chunked


@needs("DefaultAllGather", without="FSDP2 can't gather float8 over gloo")
def check_default_all_gather():
    gather, out = private.DefaultAllGather(), torch.zeros(2)
    gather(out, torch.ones(2), dist.group.WORLD, False)
    assert out.eq(1).all()


# torch.compile


@needs(
    "dynamo_config",
    "functorch_config",
    "inductor_config",
    "opaque_objects_weigh_nothing",
    "ASYNC_TP_SETTING",
    without="torch runs eagerly what it can't compile, or async tensor parallelism is not switched on",
)
def check_settings():
    dynamo, functorch, inductor = (
        private.dynamo_config(),
        private.functorch_config(),
        private.inductor_config(),
    )
    assert dynamo.disable is False
    assert dynamo.suppress_errors is False
    for name in (
        "fail_on_recompile_limit_hit",
        "nested_graph_breaks",
        "skip_fwd_side_effects_in_bwd_under_checkpoint",
    ):
        assert isinstance(getattr(dynamo, name), bool), name
    assert dynamo.recompile_limit == 8
    with functorch.patch(
        activation_memory_budget=0.5,
        enable_autograd_cache=False,
        memory_budget_pareto_dir="",
        visualize_memory_budget_pareto=False,
        **private.opaque_objects_weigh_nothing(),
    ):
        pass
    with inductor.patch({private.ASYNC_TP_SETTING: True, "fx_graph_cache": False}):
        pass
    assert hasattr(inductor, "post_grad_custom_post_pass")


@needs(
    *("break_graphs_in_calls", "compiles_checkpoints"),
    without="a block of FLA is a graph for each module, and a recomputed one fails within torch 2.11",
)
def check_break_graphs_in_calls():
    assert private.compiles_checkpoints() == (torch.__version__ >= (2, 13))
    dynamo = private.dynamo_config()
    with dynamo.patch(nested_graph_breaks=False):
        private.break_graphs_in_calls()
        assert dynamo.nested_graph_breaks == (torch.__version__ >= (2, 13))


@needs(
    "compiler_counters",
    "dynamo_errors",
    without="a block that runs eagerly in spite of torch.compile goes unnoticed",
)
def check_compiler_counters():
    assert issubclass(private.dynamo_errors().FailOnRecompileLimitHit, Exception)
    assert issubclass(private.dynamo_errors().TorchDynamoException, Exception)
    torch.compiler.reset()
    before = private.compiler_counters()["stats"]["unique_graphs"]
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))
    assert private.compiler_counters()["stats"]["unique_graphs"] == before + 1


@needs(
    "compilations",
    "remember_compilations",
    "set_guard_hook",
    "compile_id",
    without="a block that was to be compiled and ran eagerly goes unnoticed",
)
def check_compilations():
    torch.compiler.reset()
    found, ids = [], []

    def backend(graph, inputs):
        ids.append(private.compile_id())
        return graph.forward

    def hook(hit):
        found.append(hit)
        return hit

    private.remember_compilations(1000)
    assert private.set_guard_hook(hook) is None
    try:
        before = len(private.compilations())
        compiled = torch.compile(lambda x: x + 1, backend=backend)
        compiled(torch.ones(1))
        compiled(torch.ones(1))
        (made,) = private.compilations()[before:]
    finally:
        assert private.set_guard_hook(None) is hook
        private.remember_compilations(None)
    assert (made.fail_type, made.fail_reason, made.has_guarded_code) == (None, None, True)
    assert ids == [str(made.compile_id)] == ["0/0"]
    assert found == [True]
    assert private.compile_id() == ""


@needs(
    *("graph_pass", "own_passes", "set_own_passes", "FIRST_PASSES", "LAST_PASSES"),
    without="the collectives of compiled graphs are not seen, and none is fused",
)
def check_own_passes():
    class Pass(private.graph_pass()):
        def __call__(self, graph):
            seen.append(self)

        def uuid(self): ...

    one, two, three, seen = Pass(), Pass(), Pass(), []
    for first, last in (((), ()), ((), (one,)), ((three,), (one, two))):
        private.set_own_passes(private.FIRST_PASSES, first)
        private.set_own_passes(private.LAST_PASSES, last)
        try:
            assert private.own_passes(private.FIRST_PASSES) == first
            assert private.own_passes(private.LAST_PASSES) == last
            torch.compiler.reset()
            seen.clear()
            torch.compile(lambda x: x.sin() + 1)(torch.ones(len(last) + 2))
        finally:
            private.set_own_passes(private.FIRST_PASSES, ())
            private.set_own_passes(private.LAST_PASSES, ())
        assert seen == [*first, *last]


@needs("keep_order", "in_order", without="inductor may undo the order in which collectives are overlapped")
def check_keep_order():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    before, after = (
        graph.call_function(operator, (x,))
        for operator in (torch.ops.aten.sin.default, torch.ops.aten.cos.default)
    )
    graph.output((before, after))
    module = torch.fx.GraphModule(nn.Module(), graph)
    nodes = list(module.graph.nodes)
    private.keep_order(module.graph, {nodes[2]: [nodes[1]]})
    module.recompile()
    (_, first, _, second, _) = module.graph.nodes
    assert first in second.all_input_nodes
    assert private.in_order(second).target is torch.ops.aten.cos.default
    assert private.in_order(first) is first
    assert torch.equal(module(torch.ones(1))[1], torch.ones(1).cos())


@needs("inductor_stages", without="async-tp can't decide without a GPU")
def check_inductor_stages():
    stages, seen = private.inductor_stages(), []

    def finish(module, inputs, **options):
        stages.view_to_reshape(module)
        fake = stages.fake_tensor_prop(module, list(inputs))
        with stages.V.set_fake_mode(fake):
            stages.post_grad_passes(module, is_inference=True)
        seen.append(module)
        return stages.make_boxed_func(module.forward)

    torch.compiler.reset()
    compiled = torch.compile(
        lambda x: x @ x, backend=lambda graph, inputs: stages.compile_fx(graph, inputs, inner_compile=finish)
    )
    with torch.no_grad():
        assert torch.equal(compiled(torch.ones(2, 2)), torch.full((2, 2), 2.0))
    assert len(seen) == 1


@needs("is_compiled_whole", without="DDP's hooks end up inside of a graph")
def check_is_compiled_whole():
    linear = nn.Linear(2, 2)
    assert not private.is_compiled_whole(linear)
    assert private.is_compiled_whole(torch.compile(linear, backend="eager"))
    linear.compile(backend="eager")
    assert private.is_compiled_whole(linear)


@needs(
    "compile_at_most",
    without="a kind of block is compiled again and again, or runs eagerly from some time on",
)
def check_compile_at_most():
    torch.compiler.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    before, private.dynamo_config().fail_on_recompile_limit_hit = (
        private.dynamo_config().fail_on_recompile_limit_hit,
        True,
    )
    try:
        compiled = private.compile_at_most(lambda x: x + 1, 2, backend=backend, dynamic=False)
        for length in (2, 3, 2):
            compiled(torch.ones(length))
        with pytest.raises(private.dynamo_errors().FailOnRecompileLimitHit):
            compiled(torch.ones(4))
    finally:
        private.dynamo_config().fail_on_recompile_limit_hit = before
    assert len(graphs) == 2


@needs("backend_function", without="a memory budget can't be set around a backend that is given by name")
def check_backend_function():
    assert callable(private.backend_function("aot_eager"))
    assert private.backend_function(len) is len


@needs("is_disabled", "enabled_function", without="FLA's kernels cut graphs in the middle of a module")
def check_is_disabled():
    disabled = torch.compiler.disable(check_backend_function)
    assert private.is_disabled(disabled)
    assert not private.is_disabled(check_backend_function)
    assert private.enabled_function(disabled) is check_backend_function
    assert private.enabled_function(check_backend_function) is None


@needs(
    "inductor_option_names",
    "check_inductor_options",
    without="a misspelled option of inductor's fails in the first step",
)
def check_inductor():
    assert "max_autotune" in private.inductor_option_names()
    private.check_inductor_options({"max_autotune": True})
    with pytest.raises(RuntimeError, match="max_autotune"):
        private.check_inductor_options({"max_autotune": "yes"})


# torchao


@needs("gains_by_float8", without="auto_filter_small_kn leaves nothing out")
def check_gains_by_float8():
    gains = private.gains_by_float8("tensorwise")
    assert gains(nn.Linear(8192, 8192, device="meta"), "large")
    assert not gains(nn.Linear(64, 64, device="meta"), "small")


@needs(
    "is_float8_gathered",
    "stored_weight",
    "set_gather_scale",
    without="a weight is cast with its shard's scale, and a checkpoint holds torchao's tensors",
)
def check_float8_gather():
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    model = nn.Sequential(nn.Linear(16, 16, bias=False))
    weight = model[0].weight.detach().clone()
    convert_to_float8_training(
        model, config=Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
    )
    assert not private.is_float8_gathered(model[0].weight)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    (param,) = model.parameters()
    assert private.is_float8_gathered(param)
    assert private.stored_weight(private.local_tensor(param)).equal(weight)
    private.set_gather_scale(param, torch.tensor(2.0))
    data, metadata = private.local_tensor(param).fsdp_pre_all_gather(param.device_mesh)
    assert metadata == (2.0,)
    assert data[0].dtype == torch.float8_e4m3fn


@needs("cast_to_float8", without="a float64 proof of float8 casts otherwise in a forward than in a backward")
def check_cast_to_float8():
    from torchao.float8.float8_training_tensor import hp_tensor_and_scale_to_float8

    ours = torch.ones(2)
    with mock.patch.object(private.cast_to_float8(), "forward", return_value=ours):
        cast = hp_tensor_and_scale_to_float8(torch.ones(1), torch.ones(()), torch.float8_e4m3fn)
    assert cast.equal(ours)


@needs("float8_data", "float8_scale", without="float8 products can't be computed by other means")
def check_float8_tensor():
    from torchao.float8.float8_training_tensor import (
        GemmInputRole,
        LinearMMConfig,
        hp_tensor_and_scale_to_float8,
    )

    tensor = hp_tensor_and_scale_to_float8(
        torch.ones(2), torch.tensor(4.0), torch.float8_e4m3fn, LinearMMConfig(), GemmInputRole.INPUT
    )
    assert private.float8_data(tensor).float().eq(4).all()
    assert private.float8_scale(tensor) == 4


# Everywhere else


def private_names(file: Path, own: set[str]) -> list[str]:
    """Return the lines of `file` that reach a private name of another library."""
    tree = ast.parse(file.read_text())
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in LIBRARIES:
            parts = (node.module or "").split(".") + [alias.name for alias in node.names]
        elif isinstance(node, ast.Import):
            parts = [part for alias in node.names for part in alias.name.split(".")]
        elif isinstance(node, ast.Attribute):
            written = ast.unparse(node)
            if (
                written.startswith(("torch.ops.", "self.", "cls.", "super().", "os._exit"))
                and written.count("._") == 1
            ):
                continue
            parts = [] if node.attr in PUBLIC_TABLES | OTHERS | own else [node.attr]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "setattr", "hasattr"):
            name = node.args[1]
            parts = [name.value] if isinstance(name, ast.Constant) and name.value not in OTHERS | own else []
        else:
            continue
        if any(str(part).startswith("_") and not str(part).startswith("__") for part in parts):
            found.add(f"{file.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}")
    return sorted(found)


def own_names() -> set[str]:
    """Return the private names that titanplans itself defines on modules, classes and instances."""
    names = set()
    for file in (ROOT / "titanplans").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef):
                names.add(node.name)
            elif (
                isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Store)
                and ast.unparse(node.value) == "self"
            ):
                names.add(node.attr)
            elif isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith(".__dict__"):
                names.update(part.value for part in ast.walk(node.slice) if isinstance(part, ast.Constant))
    return names


def test_private_names_are_reached_in_one_file():
    own = own_names()
    found = [
        line
        for file in (ROOT / "titanplans").rglob("*.py")
        if not str(file.relative_to(ROOT / "titanplans")).startswith("torch_private.py")
        for line in private_names(file, own)
    ]
    assert not found, "\n".join(found)


def test_the_search_finds_private_names():
    file = ROOT / "tests" / "test_torch_private.py"
    found = "\n".join(private_names(file, own_names()))
    assert "torch._subclasses.fake_tensor" in found
    assert "options._timeout" in found


# Last, when all checks are there.


@pytest.mark.parametrize(("check", "names", "without"), CHECKS, ids=[check.__name__ for check, *_ in CHECKS])
def test_private_names_do_what_titanplans_needs(check, names, without):
    print(f"Without {', '.join(names)}: {without}.")
    check()


def test_every_name_has_a_check():
    own = {
        name
        for name, value in vars(private).items()
        if name.isupper() or getattr(value, "__module__", "") == private.__name__
    }
    assert sorted(own | set(private.__all__)) == sorted(name for _, names, _ in CHECKS for name in names)
