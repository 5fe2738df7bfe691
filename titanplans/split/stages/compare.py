"""Whether the stages of a model compute what the unsplit model computes: `check_stages`."""

import copy
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from titanplans.errors import ParallelError
from titanplans.plan.decoder import is_held
from titanplans.split.stages.expressions import Expressions
from titanplans.split.stages.stages import Stages
from titanplans.split.stages.trace import read_by_loss, without_cache
from titanplans.torch_private.dispatch import rows_for_meta, tree_leaves
from titanplans.user_code import as_user_error

Numbers = tuple[Hashable, ...]


class _Forward(NamedTuple):
    """The expressions of a forward: those of each block's arguments and of what it returns, by the block's name."""

    arguments: Mapping[str, Numbers]
    returned: Mapping[str, Numbers]
    output: Numbers
    """Of the logits; of what a stage gives."""
    buffers: Mapping[str, Hashable]
    """Of each buffer, after the forward."""
    given: Sequence[torch.Tensor]
    """What a stage gives to the next one."""
    trained: frozenset[str]
    """The parameters that the backward of the output gives a gradient."""


def check_stages(model: nn.Module, stages: Stages, inputs: Mapping[str, Any]) -> None:
    """Refuse stages whose forwards are not, operator by operator, the forward of `model`, in training or in evaluation.

    Args:
        model: the unsplit model, on any device; on meta inside of `titanplans.kernels.for_meta`. It is left as it is.
        stages: of it.
        inputs: keyword arguments of its forward.

    Raises:
        ParallelError: names the first block that computes something else, or what else differs.
    """
    was_training = model.training
    try:
        for training in (True, False):
            model.train(training)
            expressions = Expressions(model, inputs)
            _check_mode(model, stages, inputs, expressions)
            if expressions.has_read:  # its code has gone one way, and now goes the other
                expressions.answer = True
                _check_mode(model, stages, inputs, expressions)
    finally:
        model.train(was_training)


def _check_mode(
    model: nn.Module, stages: Stages, inputs: Mapping[str, Any], expressions: Expressions
) -> None:
    names, trained = stages.decoder.names, set[str]()
    whole = _check_whole(expressions, copy.deepcopy(model), names, inputs)
    received: Sequence[torch.Tensor] = ()
    for index in range(len(stages)):
        part = copy.deepcopy(model)
        stage = stages.cut(part, index)
        stage.watch()
        own = [name for name in names if is_held(name, stages.passed[index])]
        place = f"stage {index} of {len(stages)}"
        expressions.begin(part, received)
        alone = f"{place} has no other values of earlier blocks than those that blocks return, and ends with"
        with as_user_error(alone, ParallelError):
            forward = partial(stage.run, received, partial(_output, part, inputs))
            found = _run(expressions, part, own, forward)
        what = _difference(found, whole, own) or _difference_in_buffers(found, whole)
        if what is None and not stage.gives and found.output != whole.output:
            what = "the logits are made of what only another stage has"
        if what is None and (idle := found.trained - whole.trained):
            what = f"{min(idle)} gets a gradient of zeros, and none in the unsplit model"
        if what is not None:
            raise ParallelError(f"in {place}, {what}: let blocks hand values on as arguments and results")
        received = [x.detach().requires_grad_(x.requires_grad) for x in found.given]
        trained |= found.trained
    if lost := whole.trained - trained:
        raise ParallelError(f"{min(lost)} gets no gradient in any stage, and one in the unsplit model")


def _check_whole(
    expressions: Expressions, model: nn.Module, names: Sequence[str], inputs: Mapping[str, Any]
) -> _Forward:
    """Return the forward of the unsplit model.

    Raises:
        ParallelError: it draws random numbers, or its second forward is another one: a stage runs forwards that the unsplit
            model does not.
    """
    forward = partial(_output, model, inputs)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    expressions.begin(model)
    first = _run(expressions, model, names, forward)
    if expressions.draws is not None:
        raise ParallelError(
            f"its forward draws random numbers ({expressions.draws}), which stages would draw alike, and others in a "
            "resumed job: draw none"
        )
    if model.training:
        after = dict(model.named_buffers())
        with torch.no_grad():
            for name in before.keys() & after.keys():
                after[name].copy_(before[name])
        again = _run(expressions, model, names, forward)
        if again.output != first.output:  # it reads what it has moved, and that is no cache
            expressions.reset(model)
            again = _run(expressions, model, names, forward)
        if again.output != first.output:
            what = _difference(again, first, names) or "its logits differ"
            raise ParallelError(
                f"a second forward of it is another one ({what}), and stages run more of them: keep what changes from "
                "forward to forward in a buffer"
            )
    return first


def _output(model: nn.Module, inputs: Mapping[str, Any]) -> Any:
    return read_by_loss(model(**inputs, **without_cache(model)))


def _run(
    expressions: Expressions, model: nn.Module, names: Sequence[str], forward: Callable[[], Any]
) -> _Forward:
    """Call `forward`, a forward of `model`, and note the expressions of the blocks called `names`."""
    arguments: dict[str, Numbers] = {}
    returned: dict[str, Numbers] = {}

    def enter(name: str, block: nn.Module, args: Any, kwargs: Any) -> None:
        arguments[name] = expressions.of_all((args, kwargs))
        expressions.enter(name, is_block=True)

    def leave(name: str, block: nn.Module, args: Any, output: Any) -> None:
        returned[name] = expressions.of_all(output)
        expressions.enter(f"after {name}", is_block=False)

    expressions.enter("before the blocks", is_block=False)
    with ExitStack() as stack, torch.set_grad_enabled(model.training), rows_for_meta(), expressions:
        for name in names:
            block = model.get_submodule(name)
            stack.callback(block.register_forward_pre_hook(partial(enter, name), with_kwargs=True).remove)
            stack.callback(block.register_forward_hook(partial(leave, name)).remove)
        output = forward()
    buffers = {name: expressions.of(buffer) for name, buffer in model.named_buffers()}
    given = output if isinstance(output, tuple) else ()
    trained = expressions.names(model, _trained(output))
    return _Forward(arguments, returned, expressions.of_all(output), buffers, given, trained)


def _trained(output: Any) -> set[int]:
    """Return the `id`s of the leaves that a backward of `output` reaches."""
    nodes = [x.grad_fn for x in tree_leaves(output) if isinstance(x, torch.Tensor)]
    seen: set[Any] = set()
    while nodes:
        if (node := nodes.pop()) is not None and node not in seen:
            seen.add(node)
            nodes += (node for node, _ in node.next_functions)
    return {id(node.variable) for node in seen if hasattr(node, "variable")}


def _difference(found: _Forward, whole: _Forward, names: Sequence[str]) -> str | None:
    """Return in words which of the blocks called `names` is the first that differs; None: none does."""
    for name in names:
        if found.arguments.get(name) != whole.arguments[name]:
            return f"{name} is given something else than in the unsplit model"
        if found.returned[name] != whole.returned[name]:
            return (
                f"{name} computes something else of the same arguments, by an attribute, a list or a counter"
            )
    return None


def _difference_in_buffers(found: _Forward, whole: _Forward) -> str | None:
    differing = (name for name, number in found.buffers.items() if number != whole.buffers.get(name))
    name = next(differing, None)
    return None if name is None else f"buffer {name} changes otherwise than in the unsplit model"
