"""Autograd's graph: its nodes, the versions of tensors, and who holds a gradient."""

from typing import Any

import torch


def version(tensor: torch.Tensor) -> int:
    """Return how often `tensor` has been written to in place; 0 of one made in inference mode, where nobody counts."""
    return 0 if tensor.is_inference() else tensor._version


def is_view(tensor: torch.Tensor) -> bool:
    """Return whether autograd tracks `tensor` as a view of another one."""
    return tensor._base is not None


ENGINE_HOLDS = 1 if torch.__version__ >= "2.13" else 2
"""How often autograd's engine holds the gradient that a backward is given."""


def grad_refcount(gradient: torch.Tensor) -> int:
    """Return how many hold `gradient`, which the running backward was given, its engine counted as one.

    Of a view, also how many hold the tensor that it is a view of: as another gradient, they have its memory.
    """
    holders = gradient._use_count() - ENGINE_HOLDS + 1  # pyrefly: ignore[missing-attribute]
    base = gradient._base
    # Its view holds it, and `base` does.
    return holders if base is None else max(holders, base._use_count() - 1)  # pyrefly: ignore[missing-attribute]


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


def accumulates(node: Any) -> bool:
    """Whether the running backward adds up what `node`, which runs, returns for leaves: `autograd.grad` does not."""
    leaf = next((function for function, _ in node.next_functions if function is not None), None)
    if leaf is None:
        return False
    try:
        return torch._C._will_engine_execute_node(leaf)  # pyrefly: ignore[missing-attribute]
    except RuntimeError:  # it does not answer for leaves in `autograd.grad`
        return False


def has_backward_hooks(x: torch.Tensor | torch.nn.Module) -> bool:
    """Whether hooks see the gradient of a tensor, or of what a module takes or returns."""
    return bool(x._backward_hooks) or bool(getattr(x, "_backward_pre_hooks", None))


def saves_otherwise() -> bool:
    """Whether hooks replace the tensors that the graph saves, as those of torch.utils.checkpoint do."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
