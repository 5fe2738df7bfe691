"""`ParallelManager`: meshes, parallelisation, loss and gradients for your own training loop.

    with process_group():
        manager = ParallelManager(FSDP2Config(), Degrees(tp=2))
        model = manager.parallelize(model)

Each method calls a function of `parallelize`, `split.gradients`, `gradient_sync`, `loss`, `ddp` or `megatron_fsdp`, which
can also be used without a manager.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from titanplans.config import Compile, DDPConfig, FSDP2Config, MegatronFSDPConfig, Strategy
from titanplans.errors import ParallelError
from titanplans.loss import count_tokens, cross_entropy
from titanplans.parallel import ddp, megatron_fsdp
from titanplans.parallel.compile import async_tp, compile_loss, compile_optimizer
from titanplans.parallel.fsdp import gradient_sync
from titanplans.parallel.mesh.degrees import refuse_degrees
from titanplans.parallel.mesh.mesh import Mesh
from titanplans.parallel.mesh.process_group import default_device_type
from titanplans.parallel.optimizers.carry_over import carry_over
from titanplans.parallel.optimizers.muon import Muon
from titanplans.parallel.parallelize import apply_steps, check_compatible, on_meta
from titanplans.parallel.replica_check import check_equal_values
from titanplans.parallel.report import ParallelismReport
from titanplans.plan.degrees import Degrees
from titanplans.split import gradients
from titanplans.text import class_name
from titanplans.torch_private.distributed import group_device_types

F = TypeVar("F", bound=Callable[..., Any])


class ParallelManager:
    """Parallelise one model by `config`, and run its training steps.

    Construction is collective: every rank constructs one, inside a process group (`process_group`).

    Args:
        config: the strategy, with its options.
        degrees: the degree of each mesh axis; None: all ranks are data-parallel.
        device_type: "cuda", "cpu", ...; None: the accelerator that torch sees, if the process group has a backend for it,
            else the CPU.
        dump_folder: the folder for files that a training step writes, such as torch's plot of memory budgets.

    Raises:
        ParallelError: the process group has no backend for `device_type`, or the degrees do not fit the number of ranks or
            the strategy.
    """

    def __init__(
        self,
        config: Strategy,
        degrees: Degrees | None = None,
        *,
        device_type: str | None = None,
        dump_folder: str = ".",
    ):
        if not isinstance(config, Strategy):
            raise ParallelError(
                f"config = {type(config).__name__}: give FSDP2Config, DDPConfig or MegatronFSDPConfig; read_strategy reads "
                "one from a dict or TOML"
            )
        if not isinstance(degrees, Degrees | None):
            raise ParallelError(f"degrees = {type(degrees).__name__}: give Degrees(tp=...), or None")
        self.config, self.dump_folder = config, dump_folder
        if degrees is None:
            degrees = Degrees(dp_replicate=-1, dp_shard=1) if isinstance(config, DDPConfig) else Degrees()
        self.mesh = Mesh(degrees, _device_type(device_type))
        refuse_degrees(self.mesh, ddp=isinstance(config, DDPConfig))
        self._model: nn.Module | None = None

    @property
    def device(self) -> torch.device:
        """This rank's device."""
        kind = self.mesh.world_mesh.device_type
        return torch.empty(0, device=kind).device

    def parallelize(self, model: nn.Module) -> nn.Module:
        """Parallelise `model` in place and return it; under Megatron-FSDP return its wrapper.

        Build the optimizer on the returned model's parameters, or pass an existing one to `prepare_optimizer`. Materialise
        a model on meta before its first forward: call `manager.to_empty()`, then initialise it or load a checkpoint.

        Args:
            model: a causal language model, on meta or with the same values on every rank. Under DDP it must have values,
                on this rank's device.

        Raises:
            PlanError: the plan does not fit the model or the degree.
            ParallelError: an option can't be honoured, values differ between ranks, or the manager already has a model.
                All are raised before any weight moves.
        """
        if self._model is not None:
            raise ParallelError("this manager already has a model: create another manager for another model")
        if not isinstance(model, nn.Module):
            raise ParallelError(f"model is a {class_name(model)}, not an nn.Module")
        config = self.config
        if isinstance(config, MegatronFSDPConfig):
            megatron_fsdp.check_available()
            megatron_fsdp.refuse_mesh(self.mesh.get_mesh(("dp_shard", "cp")))
        else:  # before check_equal_values, which takes a while
            # check_compatible allows a model on meta, for jobs; a manager does not
            if isinstance(config, DDPConfig):
                ddp.refuse_model(model, self.mesh.get_mesh("loss"))
            check_compatible(model, self.mesh, config)
        check_equal_values(model, self.device)
        if isinstance(config, MegatronFSDPConfig):
            axes = ("dp_replicate", "dp_shard", "tp")
            model = megatron_fsdp.apply_megatron_fsdp(model, self.mesh.get_mesh(axes), config)
        else:
            apply_steps(model, self.mesh, config, dump_folder=self.dump_folder)
            if on_meta(model):
                _check_at_first_forward(model)
            if isinstance(config, FSDP2Config) and config.enable_async_tensor_parallel:
                async_tp.check_at_second_forward(model, self.mesh, config.async_tensor_parallel_unfused)
        self._model = model
        return model

    def prepare_loss(self, loss: F) -> F:
        """Return `loss`, a function or a module; compiled, if "loss" is one of the strategy's compile components."""
        options = self._compile_options("loss")
        if options is None:
            return loss
        # Create the mesh now: if the compiled loss created it, its second call would recompile.
        self.mesh.get_mesh("dp")
        return compile_loss(loss, options)

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Return `optimizer`, managed by Megatron-FSDP or with its step compiled, if the strategy asks for it.

        If the optimizer was built before `parallelize`, its parameters are replaced by the parameters of the parallelised
        model; its groups and their options do not change.

        Raises:
            ParallelError: the optimizer has state of replaced parameters, can't be compiled or managed, or is torch's Muon
                on sharded weights.
        """
        model = self._parallel()
        if isinstance(self.config, MegatronFSDPConfig):
            if isinstance(optimizer, Muon):
                raise ParallelError(
                    "Muon needs full matrices, and Megatron-FSDP keeps shards of a flat buffer: use AdamW"
                )
            megatron_fsdp.register_optimizer(optimizer)
        else:
            carry_over(optimizer, model)
            _refuse_muon_on_shards(optimizer)
        options = self._compile_options("optimizer")
        return optimizer if options is None else compile_optimizer(optimizer, options)

    def accumulate(self, *, last: bool = True) -> AbstractContextManager[None]:
        """Return the context manager for the forward and backward of one micro batch; `last`: it is the step's last one.

        `fsdp_defer_grad_sync` (FSDP2) and `defer_grad_sync` (DDP) decide which reductions wait for the last one.
        """
        model, config = self._parallel(), self.config
        if isinstance(config, FSDP2Config):
            return gradient_sync.accumulate(
                model, last=last, defer=config.fsdp_defer_grad_sync, keep_gathered=config.fsdp_keep_gathered
            )
        if isinstance(config, DDPConfig):
            return ddp.accumulate(model, last=last, defer=config.defer_grad_sync)
        return megatron_fsdp.accumulate(model, last=last)

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Run forwards in eval mode and without gradients; FSDP2 gathers the parameters once for all of them."""
        model = self._parallel()
        training = {module: module.training for module in model.modules()}
        model.eval()
        uses_fsdp = isinstance(self.config, FSDP2Config)
        try:
            with gradient_sync.unsharded(model) if uses_fsdp else torch.no_grad():
                yield
        finally:
            # Module by module: a frozen tower may have been in eval mode before
            for module, mode in training.items():
                module.training = mode

    def to_empty(self) -> None:
        """Allocate a model that was built on meta, uninitialised: initialise it or load a checkpoint next.

        Under CPU offload parameters are allocated on the CPU and buffers on the device.
        """
        model = self._parallel()
        offloads = isinstance(self.config, FSDP2Config) and self.config.enable_cpu_offload
        model.to_empty(device=torch.device("cpu") if offloads else self.device)
        if offloads:
            for module in model.modules():
                for name, buffer in module.named_buffers(recurse=False):
                    module._buffers[name] = buffer.to(self.device)

    def forget_gradients(self) -> None:
        """Drop all gradients of an abandoned step, including those whose reduction waits for a later micro batch."""
        model = self._parallel()
        if isinstance(self.config, FSDP2Config):
            gradient_sync.forget_gradients(model)
        else:
            model.zero_grad()

    def count_tokens(self, labels: torch.Tensor) -> torch.Tensor:
        """Return the number of `labels` that are not -100, over all ranks; pass all labels of a step's micro batches."""
        return count_tokens(labels, self.mesh.get_mesh("dp"))

    def cross_entropy(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,
        tokens: int | torch.Tensor | None = None,
        *,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
    ) -> torch.Tensor:
        """Return this rank's term of the mean cross entropy over the global batch; see `loss.cross_entropy`.

        Gradients are summed over ranks, so the loss of the local tokens is divided by the token count of all ranks.

        Args:
            logits: [..., vocabulary], sharded over the vocabulary or not; or a `FusedLoss`'s deferred logits.
            labels: [...], the next tokens; -100 is ignored.
            tokens: `count_tokens` of the step's labels; None: `labels` are all labels of the step.
            label_smoothing, z_loss: see `loss.cross_entropy`.
        """
        tokens = self.count_tokens(labels) if tokens is None else tokens
        return cross_entropy(logits, labels, tokens, label_smoothing=label_smoothing, z_loss=z_loss)

    def parallelism_report(self) -> ParallelismReport:
        """Return the report on the model; its `measuring` adds the communication of one training step."""
        return ParallelismReport(self._parallel(), self.mesh, self.config)

    def clip_gradients(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip the gradients to `max_norm`, and return their norm over all ranks before clipping."""
        return gradients.clip_gradients(self._parallel().parameters(), max_norm, norm_type)

    def _compile_options(self, component: str) -> Compile | None:
        """Return the options for compiling `component`; None: it is not compiled."""
        if isinstance(self.config, MegatronFSDPConfig):
            return None
        options = self.config.compile
        return options if options.enable and component in options.components else None

    def _parallel(self) -> nn.Module:
        if self._model is None:
            raise ParallelError("this manager has no model yet: call parallelize(model) first")
        return self._model


def _refuse_muon_on_shards(optimizer: torch.optim.Optimizer) -> None:
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    if isinstance(optimizer, torch.optim.Muon) and any(map(_is_sharded, parameters)):
        raise ParallelError(
            "torch.optim.Muon orthogonalises a sharded weight by DTensor matrix products, which are summed over ranks in "
            "bfloat16, so its step differs from the step of one process: use titanplans.parallel.build_optimizers(model, "
            'Optimizer(name="Muon"))'
        )


def _is_sharded(parameter: torch.Tensor) -> bool:
    """Whether `parameter` is sharded over a mesh dimension of more than one rank."""
    return isinstance(parameter, DTensor) and any(
        not placement.is_replicate() and parameter.device_mesh.size(dim) > 1
        for dim, placement in enumerate(parameter.placements)
    )


def _check_at_first_forward(model: nn.Module) -> None:
    def check(module: nn.Module, inputs: Any) -> None:
        gradients.check_no_meta(module)
        handle.remove()

    handle = model.register_forward_pre_hook(check, prepend=True)


def _device_type(requested: str | None) -> str:
    """Return `requested`, or by default a device type for which the process group has a backend.

    Raises:
        ParallelError: the process group has no backend for `requested`.
    """
    if not dist.is_initialized():
        return requested or default_device_type()  # `Mesh` raises the error that there is no process group
    supported = group_device_types()
    if requested is None:
        default = default_device_type()
        return default if default in supported else "cpu"
    if requested not in supported:
        raise ParallelError(
            f"device_type = {requested!r}, but the process group has backends for {', '.join(supported)}: initialize "
            f"it with process_group({requested!r}), or omit device_type"
        )
    return requested
