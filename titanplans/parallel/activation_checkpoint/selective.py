"""The policy that recomputes each block but the outputs of some operators.

Only what torch's dispatcher sees can be kept: aten, functional collectives, `torch.library` operators. A Triton kernel
launched from Python and the body of a `torch.autograd.Function` are not operators; eager mode always runs them again,
and `keep_mixer` is for them. Products are counted within one checkpointed call.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from titanplans.errors import OptionError
from titanplans.parallel.activation_checkpoint.policies import Contexts, Full
from titanplans.torch_private import schema

Matmuls = Literal["all", "every second", "none"]


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
# A few numbers each: quantisation scales, the experts that a token was sent to.
SMALL = _present("aten", "max", "topk")


MATMULS_KEPT, OPERATORS, RECOMPUTED = (
    f"activation_checkpoint.per_op_sac_{name}"
    for name in ("matmuls", "keep_operators", "force_recompute_mm_shapes_by_fqns")
)
"""The options behind the fields of `Selective`, for errors."""


@dataclass(frozen=True, kw_only=True)
class Selective(Full):
    """Recompute every block but keep the outputs of costly operators; this file's sets say which.

    Operators of Triton kernels and of autograd.Functions can't be kept so in eager mode: give the kernel an
    operator of its own (`torch.library.triton_op`, `custom_op`) and name it in `operators`, or take `KeepMixer`.
    Attention that drops (dropout above 0) is recomputed: kept, it would leave the random generator behind.
    """

    matmuls: Matmuls = "every second"
    """Which products of activations and weights are kept."""

    attention: bool = True
    """Keep what fused attention operators (SDPA, flex) return."""

    collectives: bool = True
    """Keep what collectives return: the backward sends nothing a second time."""

    operators: tuple[str, ...] = ()
    """More operators to keep, by qualified name: "namespace::name"; all overloads if none is named."""

    recompute_linears: tuple[str, ...] = ()
    """Parts of Linear modules' names; products with weights of their sizes are recomputed whatever `matmuls` says."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.matmuls not in ("all", "every second", "none"):
            raise OptionError(MATMULS_KEPT, self.matmuls, 'take "all", "every second" or "none"')
        if self.recompute_linears and self.matmuls == "none":
            raise OptionError(
                RECOMPUTED,
                self.recompute_linears,
                'it makes exceptions from what per_op_sac_matmuls keeps, which is "none": leave one of the two out',
            )
        if self.matmuls == "none" and not (self.attention or self.collectives or self.operators):
            raise OptionError(
                MATMULS_KEPT, "none", "nothing else is kept, either: take full, or say what to keep"
            )

    def check(self, model: nn.Module) -> list[str]:
        """Return the names of the blocks that `apply` would wrap; nothing is touched.

        Raises:
            ParallelError: an operator is not registered, a name is in no Linear's, another policy was there
                before, or there are no blocks.
        """
        if find_operators(self.operators) & MATMULS:
            raise OptionError(
                OPERATORS,
                self.operators,
                "one is a product of matrices, which per_op_sac_matmuls decides: leave it out",
            )
        linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
        for part in self.recompute_linears:
            if not any(part in name for name in linears):
                raise OptionError(
                    RECOMPUTED, self.recompute_linears, f'"{part}" is in no name of a Linear of the model'
                )
        return super().check(model)

    def wrap(self, model: nn.Module, name: str, context_fn: Any = None) -> None:
        keep = SMALL | find_operators(self.operators)
        keep |= ATTENTION if self.attention else frozenset()
        keep |= COLLECTIVES if self.collectives else frozenset()
        # As the products see them: read from the module, a weight that is split over ranks is the rank's own.
        sizes = {
            (module.weight.shape[1], module.weight.shape[0])
            for inner, module in model.get_submodule(name).named_modules(prefix=name)
            if isinstance(module, nn.Linear) and any(part in inner for part in self.recompute_linears)
        }
        super().wrap(model, name, keep_operators(keep, self.matmuls, sizes))


def find_operators(names: Collection[str]) -> frozenset[Any]:
    """Return every overload of the operators called `names`, as "namespace::name" or "namespace::name.overload".

    Raises:
        ParallelError: no such operator is registered, or it draws random numbers.
    """
    found: set[Any] = set()
    for name in names:
        namespace, _, rest = name.partition("::")
        packet_name, _, overload = rest.partition(".")
        packet = getattr(getattr(torch.ops, namespace), packet_name, None) if namespace and rest else None
        if packet is None or (overload and overload not in packet.overloads()):
            raise OptionError(
                OPERATORS,
                name,
                'no operator of this process: give "namespace::name" of one that is registered by torch.library before the '
                "model is parallelised",
            )
        ops = {getattr(packet, each) for each in ([overload] if overload else packet.overloads())}
        if any(torch.Tag.nondeterministic_seeded in op.tags for op in ops):
            raise OptionError(
                OPERATORS,
                name,
                "it draws random numbers: kept, it would not draw them again, and what is recomputed after it would draw "
                "others than the forward did; leave it out",
            )
        found |= ops
    return frozenset(found)


def keep_operators(
    keep: Collection[Any], matmuls: Matmuls, never: Collection[tuple[int, int]] = ()
) -> Callable[[], Contexts]:
    """Return a `context_fn` for `torch.utils.checkpoint` that keeps the outputs of some operators.

    Args:
        keep: operators (OpOverloads) whose every output is kept.
        matmuls: which of the matrix products are; "every second" counts within one call.
        never: sizes (in, out) of weights whose product is recomputed, and not counted.
    """

    def contexts() -> Contexts:
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
