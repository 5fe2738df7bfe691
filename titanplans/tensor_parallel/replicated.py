"""Styles of what every rank holds whole; they differ in which share of the work a rank's gradient is."""

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate

from titanplans.tensor_parallel.float8 import is_float8
from titanplans.tensor_parallel.layout import Layout
from titanplans.tensor_parallel.sent import Call, Sent
from titanplans.tensor_parallel.stream import Border, Stream
from titanplans.tensor_parallel.styles import ParameterStyle, Style, on_input, on_output


class ReplicatedInRegion(ParameterStyle):
    """Replicate a module's parameters inside a region: their gradient is a sum over the ranks.

    For what stands between the region's entry and its `Rowwise`, such as a norm over each head. What
    works on the sum, after the `Rowwise`, is on the stream again: `ReplicatedOnStream`.
    """

    inside = True
    remedy = "a norm over a width that is split is split_norm() or gathered_in_region()"

    def layout(self, name: str, param: nn.Parameter) -> Layout | None:
        return Layout(Replicate(), Partial())

    def split(self, module: nn.Module, mesh: DeviceMesh) -> dict[str, Any]:
        return {"sharing": mesh.size()}


class AddedToSum(ParameterStyle):
    """Replicate what each rank adds to its part of a sum, such as experts' biases; each adds an even part of it.

    Args:
        degree: number of ranks.
    """

    inside = True

    def __init__(self, *, degree: int):
        self.degree = degree

    def layout(self, name: str, param: nn.Parameter) -> Layout | None:
        return Layout(Replicate(), Partial(), addends=self.degree)


class ReplicatedOnStream(ParameterStyle):
    """Replicate a module's parameters on the residual stream, where it works token by token."""

    def __init__(self, *, stream: Stream):
        self.stream = stream

    def layout(self, name: str, param: nn.Parameter) -> Layout | None:
        return Layout(Replicate(), self.stream.gradient)

    def refusal(self, module: nn.Module) -> str | None:
        if is_float8(module) and self.stream.dim is not None:
            return (
                "in float8 a rank would scale its shard of the sequence as if it were all of it: leave the module out of "
                "float8 (filter it), or set sequence_parallel = False"
            )
        return None

    def install(self, module: nn.Module, mesh: DeviceMesh) -> None:
        if self.stream.dim is not None:
            module.register_forward_pre_hook(self._check)

    def _check(self, module: nn.Module, args: Any) -> None:
        # On a whole sequence each rank's gradient is the whole one, and would be summed.
        if torch.is_grad_enabled():
            self.stream.check_runs()


class ReplicatedOffStream(ParameterStyle):
    """Replicate a module that every rank calls with the same input: before, beside or after the stream.

    For what prepares the embeddings, such as a vision tower, and for what stands in a `Whole` module: the work and its
    gradients are the same on every rank.
    """

    def layout(self, name: str, param: nn.Parameter) -> Layout | None:
        return Layout(Replicate(), Replicate())


class Whole(ReplicatedOffStream):
    """Run a module whole on every rank, beside the stream: a mixer that can't be split by heads.

    Its input is the whole sequence, and its output is laid out as the stream again. Under sequence parallelism that
    takes a gather in the forward and one in the backward; nothing is summed.

    Args:
        stream: the residual stream.
        input_name: keyword under which the input comes if it is not the first positional argument.
    """

    gathers = True

    def __init__(self, *, stream: Stream, input_name: str = "hidden_states"):
        self.stream, self.input_name = stream, input_name

    def parameter_refusal(self, name: str, param: nn.Parameter) -> str | None:
        return Style.parameter_refusal(self, name, param)

    def sends(self, module: nn.Module, call: Call) -> tuple[Sent, ...]:
        if call.dim is None:
            return ()
        return Sent(("all_gather",), (), call.elements), Sent((), ("all_gather",), call.elements)

    def install(self, module: nn.Module, mesh: DeviceMesh) -> None:
        border = Border(mesh, self.stream)
        module.register_forward_pre_hook(partial(self._gather, border), with_kwargs=True)
        module.register_forward_hook(partial(self._shard, border))

    def _gather(self, border: Border, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return on_input(border.whole, self, self.input_name, module, args, kwargs)

    def _shard(self, border: Border, module: nn.Module, args: Any, output: Any) -> Any:
        return on_output(border.shard, output)


class EndOfStream(ReplicatedOffStream):
    """Replicate the module at whose entry the stream ends; it and all behind it see the whole sequence.

    For a final norm whose output the model's code views by the shape of the token ids.

    Args:
        stream: the residual stream.
    """

    def __init__(self, *, stream: Stream):
        self.stream = stream

    def parameter_refusal(self, name: str, param: nn.Parameter) -> str | None:
        return Style.parameter_refusal(self, name, param)

    def sends(self, module: nn.Module, call: Call) -> tuple[Sent, ...]:
        return () if call.dim is None else (Sent(("all_gather",), (), call.elements),)

    def install(self, module: nn.Module, mesh: DeviceMesh) -> None:
        module.register_forward_pre_hook(partial(self._end, Border(mesh, self.stream)))

    def _end(self, border: Border, module: nn.Module, args: Any) -> Any:
        if border.stream.dim is None:
            return None
        whole = border.end(args[0])
        border.stream.stop()
        return (whole, *args[1:])
