"""The operators of a recomputed block whose outputs are kept: selective activation checkpointing.

Only what torch's dispatcher sees can be kept: aten, functional collectives, `torch.library` operators. A Triton kernel
launched from Python and the body of a `torch.autograd.Function` are not operators; eager mode always runs them again:
give the kernel an operator of its own (`torch.library.triton_op`, `custom_op`), or take `keep_mixer`. Attention that
drops (dropout above 0) is recomputed: kept, it would leave the random generator behind. Products are counted within
one checkpointed call.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from titanplans.config import ActivationCheckpoint
from titanplans.torch_private.dispatch import schema


def _present(namespace: str, *names: str) -> frozenset[Any]:
    """Return the default overloads of those operators that this torch and this build have."""
    packets = (getattr(getattr(torch.ops, namespace), name, None) for name in names)
    return frozenset(packet.default for packet in packets if packet is not None)


# Products of activations with weights. Not bmm: attention's scores, whose size is the length squared.
MATMULS = _present("aten", "mm", "addmm", "linear", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm")
ATTENTION = _present(
    "aten",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_fused_attention_overrideable",
) | {torch.ops.higher_order.flex_attention}
# Both halves: what `wait_tensor` returns is the collective's own storage, so keeping it costs nothing.
COLLECTIVES = _present(
    "_c10d_functional",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "all_reduce",
    "all_to_all_single",
    "wait_tensor",
)
# Quantisation scales. Not topk, though it is small: routers of transformers divide its values in place.
SMALL = _present("aten", "max")


_OPERATORS = "per_op_sac_keep_operators"


def check_operators(model: nn.Module, options: ActivationCheckpoint) -> None:
    """Refuse operators to keep that can't be, and names that are no Linear's.

    Raises:
        OptionError: an operator is not registered or a product of matrices, or a name is in no Linear's.
    """
    if _find(options) & MATMULS:
        raise options.error(
            _OPERATORS, "one is a product of matrices, which per_op_sac_matmuls decides: leave it out"
        )
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    for part in options.per_op_sac_force_recompute_mm_shapes_by_fqns:
        if not any(part in name for name in linears):
            raise options.error(
                "per_op_sac_force_recompute_mm_shapes_by_fqns",
                f'"{part}" is in no name of a Linear of the model',
            )


def keep_operators(
    block: nn.Module, name: str, options: ActivationCheckpoint
) -> Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]:
    """Return a `context_fn` for `torch.utils.checkpoint` of `block`, called `name`, that keeps outputs of operators."""
    keep = SMALL | _find(options)
    keep |= ATTENTION if options.per_op_sac_keep_attention else frozenset()
    keep |= COLLECTIVES if options.per_op_sac_keep_collectives else frozenset()
    matmuls = options.per_op_sac_matmuls
    # Sizes (in, out) as the products see them: read from the module, a weight that is split over ranks is the rank's own.
    never = {
        (module.weight.shape[1], module.weight.shape[0])
        for inner, module in block.named_modules(prefix=name)
        if isinstance(module, nn.Linear)
        and any(part in inner for part in options.per_op_sac_force_recompute_mm_shapes_by_fqns)
    }

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        count = {False: 0, True: 0}  # torch before 2.12 asks again in the recomputation

        def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            kept = op in keep and not _draws(op, args, kwargs)
            if op in MATMULS and _weight_size(op, args) not in never:
                count[ctx.is_recompute] += 1
                kept = matmuls == "all" or (matmuls == "every second" and count[ctx.is_recompute] % 2 == 1)
            elif op is torch.ops.aten._to_copy.default and _leaves_device(args, kwargs):
                kept = True
            return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    return contexts


def _find(options: ActivationCheckpoint) -> frozenset[Any]:
    """Return every overload of the operators to keep, named "namespace::name" or "namespace::name.overload"."""
    found: set[Any] = set()
    for name in options.per_op_sac_keep_operators:
        namespace, _, rest = name.partition("::")
        packet_name, _, overload = rest.partition(".")
        packet = getattr(getattr(torch.ops, namespace), packet_name, None) if namespace and rest else None
        if packet is None or (overload and overload not in packet.overloads()):
            raise options.error(
                _OPERATORS,
                f'"{name}": no operator of this process: give "namespace::name" of one that is registered by '
                "torch.library before the model is parallelised",
            )
        ops = {getattr(packet, each) for each in ([overload] if overload else packet.overloads())}
        if any(torch.Tag.nondeterministic_seeded in op.tags for op in ops):
            raise options.error(
                _OPERATORS,
                f'"{name}" draws random numbers: kept, it would not draw them again, and later operators would draw other '
                "numbers in the recomputation than in the forward; leave it out",
            )
        found |= ops
    return frozenset(found)


def _weight_size(op: Any, args: tuple[Any, ...]) -> tuple[int, ...] | None:
    if op is torch.ops.aten.linear.default:
        return tuple(args[1].shape[::-1])
    return tuple(args[2 if op is torch.ops.aten.addmm.default else 1].shape)


def _draws(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether this call of an attention operator drops something, and so moves the random generator."""
    signature = schema(op)
    for index, argument in enumerate(signature.arguments if signature is not None else ()):
        if argument.name == "dropout_p":
            return bool(args[index] if index < len(args) else kwargs.get("dropout_p", 0.0))
    return False


def _leaves_device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    target = kwargs.get("device")
    return target is not None and args[0].device.type != "cpu" and torch.device(target).type == "cpu"
