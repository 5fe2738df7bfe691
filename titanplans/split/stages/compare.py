"""Check that the stages of a model compute what the unsplit model computes: `check_stages`."""

import copy
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from titanplans.errors import ParallelError
from titanplans.split.decoder import is_present
from titanplans.split.stages.expressions import Expressions, RunningFunction, model_tensors
from titanplans.split.stages.stages import Stages
from titanplans.split.stages.trace import read_by_loss, without_cache
from titanplans.torch_private.autograd import has_backward_hooks, has_saved_tensors_hooks
from titanplans.torch_private.dispatch import meta_nonzero_finds_all, tree_leaves
from titanplans.user_code import as_user_error

Numbers = tuple[Hashable, ...]


class _Forward(NamedTuple):
    """The expressions of a forward: of each block's arguments and results, by the block's name."""

    arguments: Mapping[str, Numbers]
    returned: Mapping[str, Numbers]
    output: Numbers
    """The expressions of the logits, or of the tensors that a stage sends."""
    tensors: Mapping[str, Hashable]
    """The expression of each parameter and buffer after the forward."""
    sent: Sequence[torch.Tensor]
    """The tensors that a stage sends to the next one."""
    trained: frozenset[str]
    """The parameters that get a gradient from the backward of the output."""


def check_stages(model: nn.Module, stages: Stages, inputs: Mapping[str, Any]) -> None:
    """Refuse stages whose forwards differ in an operator from the forward of `model`, in training or in evaluation.

    Args:
        model: the unsplit model, on any device; on meta inside `titanplans.kernels.for_meta`. Copies of it run.
        stages: the stages of `model`.
        inputs: keyword arguments of the forward of `model`.

    Raises:
        ParallelError: names the first block that computes something else, or the first other difference.
    """
    model = copy.deepcopy(model)  # so that the caller's modules keep their modes
    for training in (True, False):
        model.train(training)
        expressions = Expressions(model, inputs)
        _check_mode(model, stages, inputs, expressions)
        # The model's code has used a value, perhaps to branch on it: the other branch is checked, too.
        if expressions.has_read:
            expressions.answer = True
            _check_mode(model, stages, inputs, expressions)


def _check_mode(
    model: nn.Module, stages: Stages, inputs: Mapping[str, Any], expressions: Expressions
) -> None:
    names, trained = stages.decoder.names, set[str]()
    unsplit = _check_unsplit(expressions, copy.deepcopy(model), names, inputs)
    received: Sequence[torch.Tensor] = ()
    for index in range(len(stages)):
        stage_model = copy.deepcopy(model)
        stage = stages.build_stage(stage_model, index)
        stage.watch()
        stage_names = [name for name in names if is_present(name, stages.absent[index])]
        label = f"stage {index} of {len(stages)}"
        expressions.begin(stage_model, received)
        alone = (
            f"{label} has only its own modules and the values that blocks return, and its forward ends with"
        )
        with as_user_error(alone, ParallelError):
            forward = partial(stage.run, received, partial(_output, stage_model, inputs))
            staged = _run(expressions, stage_model, stage_names, forward)
        reason = _difference(staged, unsplit, stage_names) or _difference_after(staged, unsplit)
        if reason is None and not stage.gives and staged.output != unsplit.output:
            reason = "the logits are made of values that only another stage has"
        if reason is None and (idle := staged.trained - unsplit.trained):
            reason = f"{min(idle)} gets a gradient of zeros, but gets no gradient in the unsplit model"
        if reason is not None:
            raise ParallelError(f"in {label}, {reason}. Let blocks pass values on as arguments and results")
        received = [x.detach().requires_grad_(x.requires_grad) for x in staged.sent]
        trained |= staged.trained
    if lost := unsplit.trained - trained:
        raise ParallelError(f"{min(lost)} gets no gradient in any stage, but gets one in the unsplit model")


def _check_unsplit(
    expressions: Expressions, model: nn.Module, names: Sequence[str], inputs: Mapping[str, Any]
) -> _Forward:
    """Return the forward of the unsplit model.

    Raises:
        ParallelError: it draws random numbers, or a second forward differs (a stage runs more forwards than the unsplit
            model).
    """
    forward = partial(_output, model, inputs)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    expressions.begin(model)
    first = _run(expressions, model, names, forward)
    if expressions.draws is not None:
        raise ParallelError(
            f"its forward draws random numbers ({expressions.draws}), which would be equal in all stages, and would "
            "differ in a resumed job: draw no random numbers in the forward"
        )
    if model.training:
        after = dict(model.named_buffers())
        with torch.no_grad():
            for name in before.keys() & after.keys():
                after[name].copy_(before[name])
        second = _run(expressions, model, names, forward)
        # The second forward uses a buffer that the first one has changed. Its value is restored above; reset its
        # expression, too.
        if second.output != first.output:
            expressions.reset(model)
            second = _run(expressions, model, names, forward)
        if second.output != first.output:
            difference = _difference(second, first, names) or "its logits differ"
            raise ParallelError(
                f"its second forward differs from the first ({difference}), and stages run more forwards than the "
                "unsplit model: keep what changes from forward to forward in a buffer"
            )
    return first


def _output(model: nn.Module, inputs: Mapping[str, Any]) -> Any:
    return read_by_loss(model(**inputs, **without_cache(model)))


def _run(
    expressions: Expressions, model: nn.Module, names: Sequence[str], forward: Callable[[], Any]
) -> _Forward:
    """Call `forward`, a forward of `model`, and record the expressions of the blocks called `names`."""
    arguments: dict[str, Numbers] = {}
    returned: dict[str, Numbers] = {}

    def enter(name: str, block: nn.Module, args: Any, kwargs: Any) -> None:
        _refuse_other_backwards(name, (args, kwargs), training=model.training, has_hooks=has_hooks)
        arguments[name] = expressions.of_all((args, kwargs))
        expressions.enter(name)

    def leave(name: str, block: nn.Module, args: Any, output: Any) -> None:
        returned[name] = expressions.of_all(output)
        expressions.enter(f"after {name}")

    has_hooks = any(map(has_backward_hooks, model.modules()))
    expressions.enter("before the blocks")
    with (
        ExitStack() as stack,
        torch.set_grad_enabled(model.training),
        meta_nonzero_finds_all(),
        expressions,
        RunningFunction(expressions),
    ):
        for name in names:
            block = model.get_submodule(name)
            stack.callback(block.register_forward_pre_hook(partial(enter, name), with_kwargs=True).remove)
            stack.callback(block.register_forward_hook(partial(leave, name)).remove)
        output = forward()
    after = {name: expressions.of(tensor) for name, tensor in model_tensors(model)}
    sent = output if isinstance(output, tuple) else ()
    trained = expressions.names(model, _trained(output))
    return _Forward(arguments, returned, expressions.of_all(output), after, sent, trained)


def _refuse_other_backwards(name: str, arguments: Any, *, training: bool, has_hooks: bool) -> None:
    """Refuse a backward that would run twice, or not at all, if the block `name` were the first of a stage.

    `has_hooks`: a module of the model has hooks that see gradients.
    """
    if training and (not torch.is_grad_enabled() or has_saved_tensors_hooks()):
        raise ParallelError(
            f"{name} is called inside torch.utils.checkpoint or without gradients: leave recomputation to the job's "
            "[activation_checkpoint]"
        )
    leaves = tree_leaves(arguments)
    if has_hooks or any(isinstance(x, torch.Tensor) and has_backward_hooks(x) for x in leaves):
        raise ParallelError(
            f"the gradient of an argument of {name} has a hook, which two stages would run: change the gradient inside a "
            "block"
        )


def _trained(output: Any) -> set[int]:
    """Return the `id`s of the leaves that a backward of `output` reaches."""
    nodes = [x.grad_fn for x in tree_leaves(output) if isinstance(x, torch.Tensor)]
    seen: set[Any] = set()
    while nodes:
        if (node := nodes.pop()) is not None and node not in seen:
            seen.add(node)
            nodes += (node for node, _ in node.next_functions)
    return {id(node.variable) for node in seen if hasattr(node, "variable")}


def _difference(staged: _Forward, unsplit: _Forward, names: Sequence[str]) -> str | None:
    """Describe the first of the blocks `names` that returns other results than in the unsplit model; None: none does."""
    for name in names:
        if staged.returned.get(name) == unsplit.returned[name]:
            continue  # the block does not use the arguments that differ
        if staged.arguments.get(name) != unsplit.arguments[name]:
            return f"{name} gets other arguments than in the unsplit model"
        return (
            f"{name} computes other results than in the unsplit model, because it depends on an attribute, a list or a "
            "counter"
        )
    return None


def _difference_after(staged: _Forward, unsplit: _Forward) -> str | None:
    name = next((n for n, number in staged.tensors.items() if number != unsplit.tensors.get(n)), None)
    return None if name is None else f"{name} changes differently than in the unsplit model"
