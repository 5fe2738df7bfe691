"""Autograd: nodes of the graph, versions of tensors, and references to gradients."""

from typing import Any

import torch


def version(tensor: torch.Tensor) -> int:
    """Return the number of in-place writes to `tensor`; 0 for a tensor made in inference mode, which does not count them."""
    return 0 if tensor.is_inference() else tensor._version


def is_view(tensor: torch.Tensor) -> bool:
    """Return whether autograd tracks `tensor` as a view of another one."""
    return tensor._base is not None


ENGINE_REFERENCES = 1 if torch.__version__ >= "2.13" else 2
"""Number of references that the autograd engine itself holds to a gradient that it passes to a backward."""


def grad_refcount(gradient: torch.Tensor) -> int:
    """Return the number of references to a gradient that the running backward received. The engine counts as one.

    For a view, return the number of references to its base if that is larger, since they share its memory.
    """
    references = gradient._use_count() - ENGINE_REFERENCES + 1  # pyrefly: ignore[missing-attribute]
    base = gradient._base
    if base is None:
        return references
    # The view and the local variable `base` each hold a reference.
    return max(references, base._use_count() - 1)  # pyrefly: ignore[missing-attribute]


def sequence_number() -> int:
    """Return the sequence number that the next autograd node of this thread will get."""
    return torch.autograd._get_sequence_nr()


def running_node() -> Any:
    """Return the autograd node whose backward runs on this thread; None outside of a backward."""
    return torch._C._current_autograd_node()


def number_of_node(node: Any) -> int:
    """Return the sequence number of an autograd node, which it got when the forward created it."""
    return node._sequence_nr()


def in_backward() -> bool:
    """Whether the autograd engine runs on this thread: a backward, or a recomputation in it."""
    return torch._C._current_graph_task_id() != -1


def is_accumulating(node: Any) -> bool:
    """Whether the running backward accumulates the gradients that `node` returns for leaves; False in `autograd.grad`."""
    leaf = next((function for function, _ in node.next_functions if function is not None), None)
    if leaf is None:
        return False
    try:
        return torch._C._will_engine_execute_node(leaf)  # pyrefly: ignore[missing-attribute]
    except RuntimeError:  # raised for leaves in `autograd.grad`
        return False


def has_backward_hooks(x: torch.Tensor | torch.nn.Module) -> bool:
    """Whether a tensor has gradient hooks, or a module has backward hooks."""
    return bool(x._backward_hooks) or bool(getattr(x, "_backward_pre_hooks", None))


def has_saved_tensors_hooks() -> bool:
    """Whether hooks on saved tensors are active, such as those of torch.utils.checkpoint."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
