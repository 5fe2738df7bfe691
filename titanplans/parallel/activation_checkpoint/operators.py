"""Selective activation checkpointing: keep the outputs of some operators of a recomputed block. Start at `keep_operators`.

Only operators that torch's dispatcher sees can be kept: aten, functional collectives, `torch.library` operators. In eager
mode a Triton kernel that is launched from Python and the body of a `torch.autograd.Function` are always recomputed: wrap
the kernel in an operator (`torch.library.triton_op`, `custom_op`), or use `keep_mixer`.
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
    """Return the default overloads of the operators `names`; operators that this build of torch lacks are left out."""
    packets = (getattr(getattr(torch.ops, namespace), name, None) for name in names)
    return frozenset(packet.default for packet in packets if packet is not None)


# Products of activations and weights. Not bmm: it computes attention scores, whose size grows with the square of the
# sequence length.
MATMULS = _present("aten", "mm", "addmm", "linear", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm")
ATTENTION = _present(
    "aten",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_fused_attention_overrideable",
) | {torch.ops.higher_order.flex_attention}
# wait_tensor too: its output has the storage of the collective's output, so keeping it takes no memory.
COLLECTIVES = _present(
    "_c10d_functional",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "all_reduce",
    "all_to_all_single",
    "wait_tensor",
)
# Quantisation scales. Not topk, although its output is small: routers of transformers divide its values in place.
SMALL = _present("aten", "max")


_OPERATORS = "per_op_sac_keep_operators"


def check_operators(model: nn.Module, options: ActivationCheckpoint) -> None:
    """Check the operators and the names of Linears in `options`.

    Raises:
        OptionError: an operator is not registered, draws random numbers or is a matrix product, or no Linear has the name.
    """
    if _find(options) & MATMULS:
        raise options.error(
            _OPERATORS,
            "one operator is a matrix product, and per_op_sac_matmuls decides about these: leave it out",
        )
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    for substring in options.per_op_sac_force_recompute_mm_shapes_by_fqns:
        if not any(substring in name for name in linears):
            raise options.error(
                "per_op_sac_force_recompute_mm_shapes_by_fqns",
                f'"{substring}" is in no name of a Linear of the model',
            )


def keep_operators(
    block: nn.Module, name: str, options: ActivationCheckpoint
) -> Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]:
    """Return a `context_fn` of `torch.utils.checkpoint` that keeps outputs of operators of `block`, the module `name`."""
    keep = SMALL | _find(options)
    keep |= ATTENTION if options.per_op_sac_keep_attention else frozenset()
    keep |= COLLECTIVES if options.per_op_sac_keep_collectives else frozenset()
    matmuls = options.per_op_sac_matmuls
    # (inputs, outputs) of the local tensors, since `module.weight` of a split module returns its local tensor.
    never_kept = {
        (module.weight.shape[1], module.weight.shape[0])
        for inner, module in block.named_modules(prefix=name)
        if isinstance(module, nn.Linear)
        and any(substring in inner for substring in options.per_op_sac_force_recompute_mm_shapes_by_fqns)
    }

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        # Matrix products are counted per checkpointed call, and again in the recomputation: torch before 2.12 calls the
        # policy there too.
        count = {False: 0, True: 0}

        def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            # If attention with dropout were kept, the recomputation would not advance the random generator.
            is_kept = op in keep and not _draws(op, args, kwargs)
            if op in MATMULS and _weight_size(op, args) not in never_kept:
                count[ctx.is_recompute] += 1
                is_kept = matmuls == "all" or (matmuls == "every second" and count[ctx.is_recompute] % 2 == 1)
            elif op is torch.ops.aten._to_copy.default and _leaves_device(args, kwargs):
                is_kept = True
            return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    return contexts


def _find(options: ActivationCheckpoint) -> frozenset[Any]:
    """Return the overloads of the operators that the options name, as "namespace::name" or "namespace::name.overload"."""
    operators: set[Any] = set()
    for name in options.per_op_sac_keep_operators:
        namespace, _, rest = name.partition("::")
        packet_name, _, overload = rest.partition(".")
        packet = getattr(getattr(torch.ops, namespace), packet_name, None) if namespace and rest else None
        if packet is None or (overload and overload not in packet.overloads()):
            raise options.error(
                _OPERATORS,
                f'"{name}" is no operator of this process: give "namespace::name" of one that is registered with '
                "torch.library before the model is parallelised",
            )
        ops = {getattr(packet, each) for each in ([overload] if overload else packet.overloads())}
        if any(torch.Tag.nondeterministic_seeded in op.tags for op in ops):
            raise options.error(
                _OPERATORS,
                f'"{name}" draws random numbers: if it were kept, the recomputation would not draw them, and later '
                "operators would draw other numbers than in the forward; leave it out",
            )
        operators |= ops
    return frozenset(operators)


def _weight_size(op: Any, args: tuple[Any, ...]) -> tuple[int, ...] | None:
    if op is torch.ops.aten.linear.default:
        return tuple(args[1].shape[::-1])
    return tuple(args[2 if op is torch.ops.aten.addmm.default else 1].shape)


def _draws(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether this call of an attention operator has dropout, and so advances the random generator."""
    signature = schema(op)
    for index, argument in enumerate(signature.arguments if signature is not None else ()):
        if argument.name == "dropout_p":
            return bool(args[index] if index < len(args) else kwargs.get("dropout_p", 0.0))
    return False


def _leaves_device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    target = kwargs.get("device")
    return target is not None and args[0].device.type != "cpu" and torch.device(target).type == "cpu"
