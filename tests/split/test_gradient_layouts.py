"""The gradient of a split parameter, however it is computed: a DTensor with the declared placement, in its own memory."""

import copy

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from tests.support.process_groups import run_on_threads
from tests.support.step_comparison import full_copy
from tests.support.tiny_model import split
from titanplans.errors import ParallelError
from titanplans.split.collectives import group_of
from titanplans.split.layout import Layout
from titanplans.split.module_weight import ParameterMemo, ParameterMesh, localize
from titanplans.split.state import state_of

TOKENS = torch.arange(32).reshape(2, 16)


def loss_of(model, tokens=TOKENS):
    return model(tokens).logits.pow(2).sum()


def full_gradients(model):
    return {name: full_copy(param.grad) for name, param in model.named_parameters()}


def holder(world, layouts, **shapes):
    """Return a module of float64 parameters, split by `layouts`."""
    torch.manual_seed(0)
    module = torch.nn.Module()
    for name, shape in shapes.items():
        module.register_parameter(name, torch.nn.Parameter(torch.randn(shape, dtype=torch.float64)))
    where = group_of(world.mesh), world.mesh.get_local_rank()
    localize(module, ParameterMesh(world.mesh), layouts, ParameterMemo(), *where)
    return module


ROWS = Layout(Shard(0), Shard(0))


@pytest.mark.parametrize("layout", [ROWS, Layout(Replicate(), Partial()), Layout(Replicate(), Replicate())])
@pytest.mark.parametrize("size", [8, 7])
def test_placement_shape_and_memory(layout, size):
    def work(world):
        module = holder(world, {"w": layout}, w=(size, 4))
        param = module._parameters["w"]
        for use in (torch.sum, lambda w: (w.t() @ torch.ones(w.shape[0], 3).double()).sum()):
            use(module.w).backward()  # an expanded gradient, and a transposed one
            grad, param.grad = param.grad, None
            assert type(grad) is DTensor
            assert grad.placements == (layout.gradient,)
            assert (grad.shape, grad.stride()) == (param.shape, param.stride())
            assert grad.to_local().is_contiguous()
            assert grad.to_local().shape == param.to_local().shape
            ranks = 2 if layout.gradient == Partial() else 1
            assert full_copy(grad).eq(ranks * (3 if use is not torch.sum else 1)).all()

    run_on_threads(work)


def test_parameters_of_one_sum_share_no_gradient():
    def work(world):
        module = holder(world, {"a": ROWS, "b": ROWS}, a=8, b=8)
        factor = torch.arange(4.0)
        ((module.a + module.b) * factor).sum().backward()
        a, b = (module._parameters[name].grad for name in "ab")
        a.mul_(2)
        return a.to_local().tolist(), b.to_local().tolist()

    assert run_on_threads(work) == ([0, 2, 4, 6], [0, 1, 2, 3])


@pytest.mark.parametrize(
    "sum_of",
    [lambda m: m.a + m.b.view(4), lambda m: m.b.view(4) + m.a, lambda m: m.a + m.b.view(4) + m.c.reshape(4)],
)
def test_views_of_parameters_of_one_sum_share_no_gradient(sum_of):
    def work(world):
        shapes = {"a": 8, "b": (8, 1), "c": (8, 1, 1)}
        module = holder(world, dict.fromkeys(shapes, ROWS), **shapes)
        (sum_of(module) * torch.arange(4.0)).sum().backward()
        first, *others = (p.grad for p in module._parameters.values() if p.grad is not None)
        first.mul_(2)
        assert all(grad.to_local().flatten().tolist() == [0, 1, 2, 3] for grad in others)

    run_on_threads(work)


@pytest.mark.parametrize("how", ["functional_call", "attribute"])
def test_a_plain_tensor_instead_of_a_split_parameter_is_refused(how):
    def work(world):
        model = split(world, dtype=torch.float64)
        model(TOKENS)  # the first forward looks for parameters added after the split
        norm = model.layers[0].mlp_norm
        others = {"layers.0.mlp_norm.weight": torch.nn.Parameter(torch.ones(16).double())}
        if how == "attribute":
            norm.weight = others.popitem()[1]
        with pytest.raises(ParallelError, match=r"weight of a RMSNorm .*a plain tensor"):
            torch.func.functional_call(model, others, (TOKENS,))

    run_on_threads(work)


def test_a_functional_call_with_other_parameters():
    def work(world):
        model = split(world, dtype=torch.float64)
        loss_of(model).backward()
        expected = full_gradients(model)
        others = {name: torch.nn.Parameter(p.detach().clone()) for name, p in model.named_parameters()}
        torch.func.functional_call(model, others, (TOKENS,)).logits.pow(2).sum().backward()
        for name, parameter in others.items():
            assert torch.allclose(full_copy(parameter.grad), expected[name], rtol=1e-12, atol=0), name

    run_on_threads(work)


def test_a_parameter_whose_gradient_is_none_has_no_gradient():
    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, y):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad, None

    def work(world):
        module = holder(world, {"a": ROWS, "b": ROWS}, a=8, b=8)
        Nothing.apply(module.a, module.b).sum().backward()
        return module._parameters["a"].grad is None, module._parameters["b"].grad is None

    assert run_on_threads(work) == (False, True)


def test_micro_batches_recomputation_and_two_forwards():
    def work(world):
        model = split(world, dtype=torch.float64)
        loss_of(model).backward()
        expected = full_gradients(model)
        model.zero_grad()
        for sequence in TOKENS.split(1):
            loss_of(model, sequence).backward()
        micro = full_gradients(model)
        model.zero_grad()
        for layer in model.layers:
            layer.forward = lambda x, forward=layer.forward: checkpoint(forward, x, use_reentrant=False)
        loss_of(model).backward()
        recomputed = full_gradients(model)
        for name, grad in expected.items():
            assert torch.allclose(micro[name], grad, rtol=1e-12, atol=1e-12), name
            assert recomputed[name].equal(grad), name
        module = holder(world, {"w": ROWS}, w=8)
        (module.w + module.w * 2).sum().backward()
        assert full_copy(module._parameters["w"].grad).eq(3).all()

    run_on_threads(work)


def test_gradients_by_autograd_grad():
    def work(world):
        model = split(world, dtype=torch.float64)
        loss_of(model).backward()
        expected = full_gradients(model)
        model.zero_grad()
        grads = torch.autograd.grad(loss_of(model), list(model.parameters()))
        for (name, param), grad in zip(model.named_parameters(), grads, strict=True):
            assert param.grad is None
            assert type(grad) is DTensor
            assert full_copy(grad).equal(expected[name]), name

    run_on_threads(work)


def test_second_derivatives():
    def work(world):
        module = holder(world, {"w": ROWS}, w=(8, 4))
        param = module._parameters["w"]
        (first,) = torch.autograd.grad((module.w.t() ** 3).sum(), [param], create_graph=True)
        assert type(first) is DTensor
        assert first.to_local().is_contiguous()
        (second,) = torch.autograd.grad(first.sum().full_tensor(), [param])
        assert torch.allclose(full_copy(second), 6 * full_copy(param.detach()))

    run_on_threads(work)


def test_hooks_change_gradients_and_step_in_the_backward():
    def work(world):
        model = split(world, dtype=torch.float64)
        loss_of(model).backward()
        expected = {
            name: full_copy(param.detach()) - 0.1 * full_copy(param.grad)
            for name, param in model.named_parameters()
        }
        model.zero_grad()
        for param in model.parameters():
            param.register_hook(lambda grad: grad * 0.1)
            optimizer = torch.optim.SGD([param], lr=1.0)

            def step(param, optimizer=optimizer):
                if param.grad.placements != param.placements:
                    param.grad = param.grad.redistribute(placements=param.placements)
                optimizer.step()
                optimizer.zero_grad()

            param.register_post_accumulate_grad_hook(step)
        loss_of(model).backward()
        for name, param in model.named_parameters():
            assert param.grad is None
            assert torch.allclose(full_copy(param.detach()), expected[name], rtol=1e-12, atol=1e-12), name

    run_on_threads(work)


def test_copies_other_dtypes_and_other_parameters():
    def work(world):
        model = split(world, dtype=torch.float64)
        loss_of(model).backward()
        twin = copy.deepcopy(model)
        twin.zero_grad()
        loss_of(twin).backward()
        assert all(grad.equal(full_gradients(model)[name]) for name, grad in full_gradients(twin).items())
        twin.zero_grad()
        twin.float()
        loss_of(twin).backward()
        assert {param.grad.dtype for param in twin.parameters()} == {torch.float32}

        module = holder(world, {"w": ROWS}, w=8)
        module.w.sum().backward()
        larger = distribute_tensor(torch.ones(12, 2), world.mesh, [Shard(0)])
        module._parameters["w"] = torch.nn.Parameter(larger)
        module.w.sum().backward()
        assert module._parameters["w"].grad.shape == (12, 2)

    run_on_threads(work)


def local_tensor_nodes(loss):
    """Return the autograd nodes that convert parameters to local tensors."""
    visited, waiting = {}, [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and id(node) not in visited:
            visited[id(node)] = node  # a reference keeps the node alive, so its id is not used twice
            waiting += [following for following, _ in node.next_functions]
    return [node for node in visited.values() if node.name() == "_ToLocalBackward"]


def cached_local_tensors(model):
    states = [state for module in model.modules() if (state := state_of(module))]
    return [state.block_locals for state in states if state.block_locals]


def test_the_local_tensors_of_a_block_come_from_one_node():
    def work(world):
        model = split(world, dtype=torch.float64)
        norm = model.layers[0].mlp_norm
        norm.weight.requires_grad = False
        loss = loss_of(model)
        assert sorted(len(node.next_functions) for node in local_tensor_nodes(loss)) == [1, 1, 1, 13, 14]
        loss.backward()
        assert norm.weight.grad is None
        assert all((p.grad is None) == (p is norm._parameters["weight"]) for p in model.parameters())
        twice = loss_of(model) + loss_of(model, TOKENS.flip(0))
        assert len(local_tensor_nodes(twice)) == 10
        twice.backward()
        assert not cached_local_tensors(model)
        with torch.no_grad():
            loss_of(model)

    run_on_threads(work)


def test_cached_local_tensors_are_dropped_after_the_forward_of_a_block():
    def work(world):
        model = split(world, dtype=torch.float64)
        mlp, counts = model.layers[0].mlp, []
        mlp.register_forward_pre_hook(lambda module, args: counts.append(len(cached_local_tensors(model))))
        model(TOKENS)
        assert counts.pop() > 0
        assert not cached_local_tensors(model)
        handle = mlp.register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(TOKENS)
        handle.remove()
        assert not cached_local_tensors(model)
        for layer in model.layers:  # a recomputation stops in the middle of a block
            layer.forward = lambda x, forward=layer.forward: checkpoint(forward, x, use_reentrant=False)
            layer.mlp.forward = lambda x, forward=layer.mlp.forward: checkpoint(
                forward, x, use_reentrant=False
            )
        loss_of(model).backward()
        assert not cached_local_tensors(model)

    run_on_threads(work)


def test_a_module_that_does_not_run_has_no_gradient():
    def work(world):
        model = split(world, dtype=torch.float64)
        block = model.layers[0]
        block.forward = lambda x: x + block.mlp(block.mlp_norm(x))
        loss_of(model).backward()
        unused = {name for name, param in block.named_parameters() if param.grad is None}
        assert unused == {name for name, _ in block.named_parameters() if name.startswith("attn")}

    run_on_threads(work)
