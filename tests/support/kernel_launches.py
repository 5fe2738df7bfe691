"""Count the operators of a step that would launch a kernel on a GPU, by the function of titanplans that calls them.

The step runs on a CPU, where the stand-in of a kernel of flash-linear-attention runs several operators. The unsplit model
and the split model run the same stand-ins."""

import functools
import sys
from collections import Counter
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import titanplans
from titanplans.loss import added_loss, cross_entropy
from titanplans.proof.compare.forward import call
from titanplans.split.stages.trace import logits_of
from titanplans.torch_private.autograd import in_backward, number_of_node, running_node, sequence_number
from titanplans.torch_private.dispatch import schema

ROOT = str(Path(titanplans.__file__).parent) + "/"
FREE = {
    # operators that only allocate memory
    *(
        "empty",
        "empty_like",
        "empty_strided",
        "empty_permuted",
        "new_empty",
        "new_empty_strided",
    ),
    *("detach", "alias", "lift_fresh", "_unsafe_view", "split", "split_with_sizes", "unbind", "wait_tensor"),
    "scalar_tensor",  # the 0 of `torch.where(mask, x, 0)`, which is made on the host
}
COLLECTIVES = ("_c10d_functional::", "c10d::")


@functools.cache
def launches(func) -> bool:
    """Return whether the operator would launch a kernel. An operator that computes a new tensor does.

    Operators that return a view or only allocate memory launch none.
    """
    returns, name = schema(func).returns, schema(func).name.partition("::")[2]
    if name in ("_assert_async", "_local_scalar_dense"):
        return True
    views = any(value.alias_info is not None and not value.alias_info.is_write for value in returns)
    tensors = any("Tensor" in str(value.type) for value in returns)
    return tensors and not views and name not in FREE


class Launches(TorchDispatchMode):
    """Counts launches by (operator, caller).

    The caller is the innermost running function of titanplans, as "file.py function". None: no function of titanplans is
    running. An operator in a backward of torch counts for the caller of the forward.
    """

    def __init__(self):
        super().__init__()
        self.counts: Counter[tuple[str, str | None]] = Counter()
        self.nodes: dict[int, tuple[str | None, bool]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(kind not in (torch.Tensor, torch.nn.Parameter) for kind in types):
            return NotImplemented  # DTensor calls the operator again on its local tensors
        caller, in_stand_in = running()
        if not in_backward():
            self.nodes[sequence_number() - 1] = caller, in_stand_in
        elif caller is None and (node := running_node()) is not None:
            caller, in_stand_in = self.nodes.get(number_of_node(node), (caller, in_stand_in))
        # A kernel accepts tensors with any strides. Its stand-in has to copy some of them, so these copies don't count.
        if launches(func) and not (in_stand_in and func is torch.ops.aten.clone.default):
            self.counts[schema(func).name, caller] += 1
        return func(*args, **(kwargs or {}))


def running() -> tuple[str | None, bool]:
    """Return the innermost running function of titanplans, and whether a stand-in for a kernel is running."""
    frame, caller = sys._getframe(2), None
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(ROOT + "kernels/"):
            return caller, True
        if caller is None and file.startswith(
            (ROOT + "split/", ROOT + "styles/", ROOT + "plan/", ROOT + "loss/")
        ):
            caller = f"{file.rpartition('/')[2]} {frame.f_code.co_qualname}"
        frame = frame.f_back
    return caller, False


def step(model, inputs) -> None:
    output = call(model, inputs)
    logits = logits_of(output)
    labels = torch.zeros(logits.shape[:-1], dtype=torch.long)
    loss = cross_entropy(logits, labels, labels.numel())
    if (added := added_loss(model, output)) is not None:
        loss = loss + added
    loss.backward()


def count(model, inputs) -> Counter[tuple[str, str | None]]:
    """Return the launches of the second step; the first also fills caches."""
    step(model, inputs)
    model.zero_grad()
    with Launches() as launches_of_step:
        step(model, inputs)
    return launches_of_step.counts
