"""The regions of a model's blocks, with the arguments of one call each: start at `find_regions`.

A region takes the hidden states of all tokens and returns a tensor of the same shape, which the block adds to the residual
stream: a token mixer, an MLP, a mixture of experts.
"""

import copy
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from titanplans.errors import PlanError
from titanplans.split.decoder import Block, join
from titanplans.torch_private.dispatch import tree_leaves, tree_map_only
from titanplans.user_code import as_user_error


@dataclass
class ModuleCall:
    """The first call of a module: detached copies of its arguments and of its output."""

    order: int
    """Its position among the first calls of all modules."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any = None


def record_calls(root: nn.Module, run: Callable[[], Any]) -> dict[str, ModuleCall]:
    """Return the first call of every module in `root` that `run` calls, by the module's name."""
    calls: dict[str, ModuleCall] = {}

    def copied(value: Any) -> Any:
        return tree_map_only(torch.Tensor, lambda x: x.detach().clone(), value)

    def hooks_of(name: str) -> tuple[Callable[..., None], Callable[..., None]]:
        def before(_: nn.Module, args: Any, kwargs: Any) -> None:
            if name not in calls:
                calls[name] = ModuleCall(len(calls), copied(args), copied(kwargs))

        def after(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if calls[name].output is None:
                calls[name].output = copied(output)

        return before, after

    handles = []
    for name, module in root.named_modules():
        before, after = hooks_of(name)
        handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(module.register_forward_hook(after, with_kwargs=True))
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return calls


def float_tensors(value: Any) -> list[torch.Tensor]:
    """Return the floating-point tensors in nested arguments or outputs."""
    return [x for x in tree_leaves(value) if isinstance(x, torch.Tensor) and x.is_floating_point()]


Change = Callable[[str, torch.Tensor], torch.Tensor]
"""Returns the tensor to pass for a tensor argument, given the name of the argument."""


@dataclass
class RecordedRegion:
    """A region of a block, and a copy of its module that can be called as the model called it.

    Attributes:
        name: the module's name relative to its block, such as "self_attn".
        module: a copy of the module.
        call: the recorded call, which `run` repeats.
        hidden: the name of the argument with the hidden states.
        positional: whether that argument is the first one, and was passed by position.
    """

    name: str
    module: nn.Module
    call: ModuleCall
    hidden: str
    positional: bool
    argument_names: tuple[str, ...] = field(repr=False)

    def run(self, module: nn.Module | None = None, change: Change | None = None) -> torch.Tensor:
        """Return the output of `module` (None: the region's) for the recorded arguments, changed by `change`."""
        args, kwargs = self.arguments(change or (lambda _, x: x))
        return float_tensors((module or self.module)(*args, **kwargs))[0]

    def arguments(self, change: Change) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the recorded arguments, with each tensor passed through `change`."""

        def changed(name: str, value: Any) -> Any:
            return tree_map_only(torch.Tensor, lambda x: change(name, x), value)

        names = (*self.argument_names, *map(str, range(len(self.call.args))))
        args = tuple(changed(name, value) for name, value in zip(names, self.call.args, strict=False))
        return args, {name: changed(name, value) for name, value in self.call.kwargs.items()}

    @property
    def hidden_states(self) -> torch.Tensor:
        """The recorded hidden states."""
        found: list[torch.Tensor] = []
        self.arguments(lambda name, x: (name == self.hidden and found.append(x), x)[1])
        return found[0]

    def mixes_tokens(self) -> bool:
        """Return whether the output for a token depends on an earlier token."""
        base = self.run().detach()

        def change(name: str, x: torch.Tensor) -> torch.Tensor:
            if name != self.hidden:
                return x
            x = x.clone()
            # Not a constant, which a norm that subtracts the mean would remove.
            x.view(-1, x.shape[-1])[0] += torch.linspace(-1.0, 1.0, x.shape[-1], dtype=x.dtype)
            return x

        difference = (self.run(change=change).detach() - base).flatten(0, -2).abs().amax(-1)
        tokens = self.hidden_states.shape[-2]
        return bool((difference[1:tokens] > 1e-12 * base.abs().max()).any())


@dataclass
class BlockParts:
    """The parts of a block.

    Attributes:
        regions: the block's regions by their names relative to the block.
        on_stream: the modules and parameters that are in no region, by their names relative to the block.
        stream_arguments: the names of arguments [batch, sequence, ...] that the block's code combines with its hidden
            states outside of regions.
    """

    regions: dict[str, RecordedRegion]
    on_stream: list[str]
    stream_arguments: list[str] = field(default_factory=list)


def find_regions(block: Block, calls: dict[str, ModuleCall], shape: tuple[int, int]) -> BlockParts:
    """Return the regions of a block, and what is outside of them.

    Args:
        block: a block of the unsplit model.
        calls: the calls that `record_calls` returns.
        shape: the number of tokens in the recorded batch, and the hidden size.
    """
    parts = BlockParts(
        {}, [name for name, p in block.module.named_parameters(recurse=False) if p is not None]
    )
    _visit("", block.module, block.name, calls, shape, parts)
    parts.stream_arguments = _stream_arguments(block, calls[block.name], parts)
    return parts


def _stream_arguments(block: Block, call: ModuleCall, parts: BlockParts) -> list[str]:
    """Return the arguments that the block's output depends on although the outputs of its regions are held constant."""
    module = copy.deepcopy(block.module)
    for name, region in parts.regions.items():
        return_constant(module.get_submodule(name), region.call.output)
    names = tuple(inspect.signature(module.forward).parameters)
    arguments = dict(zip(names, call.args, strict=False)) | call.kwargs
    tensors = {name: x for name, x in arguments.items() if isinstance(x, torch.Tensor) and x.ndim > 2}
    _, *others = tensors  # the first are the hidden states
    shapes = [x.shape[:2] for x in tensors.values()]
    leaves = {
        name: tensors[name].clone().requires_grad_()
        for name in others
        if tensors[name].is_floating_point() and tensors[name].shape[:2] == shapes[0]
    }
    if not leaves:
        return []
    output = float_tensors(module(**(arguments | leaves)))[0]
    if not output.requires_grad:
        return []
    gradients = torch.autograd.grad(output.sum(), list(leaves.values()), allow_unused=True)
    return [name for name, gradient in zip(leaves, gradients, strict=True) if gradient is not None]


def return_constant(module: nn.Module, value: Any) -> None:
    """Let calls of `module` return `value`."""
    module.forward = lambda *args, **kwargs: value  # type: ignore[method-assign]


def _visit(
    prefix: str,
    module: nn.Module,
    block: str,
    calls: dict[str, ModuleCall],
    shape: tuple[int, int],
    parts: BlockParts,
) -> None:
    for child_name, child in module.named_children():
        name = join(prefix, child_name)
        if not any(True for _ in child.parameters()):
            continue
        has_matrix = any(p.ndim > 1 for p in child.parameters())
        call = calls.get(join(block, name))
        if has_matrix and call is not None and (region := _region(name, child, call, shape)):
            parts.regions[name] = region
        elif has_matrix and any(True for _ in child.children()):
            parts.on_stream += [join(name, own) for own, _ in child.named_parameters(recurse=False)]
            _visit(name, child, block, calls, shape, parts)
        else:
            parts.on_stream += [
                join(name, inner)
                for inner, m in child.named_modules()
                if any(True for _ in m.parameters(recurse=False))
            ]


def _region(name: str, module: nn.Module, call: ModuleCall, shape: tuple[int, int]) -> RecordedRegion | None:
    tokens, hidden_size = shape
    if isinstance(module, nn.Linear):
        return None

    def is_stream(x: Any) -> bool:
        return (
            isinstance(x, torch.Tensor)
            and x.is_floating_point()
            and x.shape[-1:] == (hidden_size,)
            and x.numel() == tokens * hidden_size
        )

    names = tuple(inspect.signature(module.forward).parameters)
    arguments = dict(zip(names, call.args, strict=False)) | call.kwargs
    hidden = next((argument for argument, x in arguments.items() if is_stream(x)), None)
    outputs = float_tensors(call.output)
    if hidden is None or not outputs or not is_stream(outputs[0]):
        return None
    positional = hidden not in call.kwargs and names[0] == hidden
    with as_user_error(f"derive: {name} ({type(module).__name__}) can't be copied", PlanError):
        copied = copy.deepcopy(module)
    return RecordedRegion(name, copied, call, hidden, positional, names)


def walk_float_arguments(region: RecordedRegion) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the floating-point arguments of a region other than the hidden states, each with its argument's name."""
    found: list[tuple[str, torch.Tensor]] = []
    region.arguments(lambda name, x: (found.append((name, x)), x)[1])
    yield from ((name, x) for name, x in found if name != region.hidden and x.is_floating_point())
