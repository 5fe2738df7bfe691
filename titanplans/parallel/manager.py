"""`ParallelManager`: everything around a plan, for people with a training loop of their own.

    with process_group():
        manager = ParallelManager(FSDP2Config(), Degrees(tp=2))
        model = manager.parallelize(model)

It holds the meshes and one model, and adds nothing to them: its steps are in `parallelize`, `gradients`,
`gradient_sync`, `loss`, `ddp` and `megatron_fsdp`, each of use without it.
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
    """The meshes of a job and its one model, parallelised as `config` says.

    Building one is collective: every rank does so, inside a process group (`process_group`).

    Args:
        config: the strategy, with its options.
        degrees: how many ranks to each axis; None gives all of them to data parallelism.
        device_type: "cuda", "cpu", …; None for the accelerator that torch sees, if the process group has a
            backend for it, or else the CPU.
        dump_folder: the folder for files that a step writes, such as the picture of a memory budget.

    Raises:
        ParallelError: the process group has no such backend; the degrees don't fit the number of ranks, or not the strategy.
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
                f"config = {type(config).__name__}: give FSDP2Config, DDPConfig or MegatronFSDPConfig; read_strategy makes "
                "one of a dict or TOML"
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
        """Return `model` parallelised: itself, changed in place; under Megatron-FSDP its wrapper.

        Build the optimizer on the result's parameters, or hand an older one to `prepare_optimizer`. A model on meta has no
        values yet: give it some (`manager.to_empty()`, then its initialisation or a checkpoint) before its first forward,
        which is an error otherwise.

        Args:
            model: a causal language model, on meta or with the same values on every rank. Under DDP with
                values, on the ranks' device.

        Raises:
            PlanError: the plan does not fit the model or the degree.
            ParallelError: an option can't be honoured; values differ between ranks; the manager has a model
                already. Before any weight moves.
        """
        if self._model is not None:
            raise ParallelError("this manager has a model already: make another manager for another model")
        if not isinstance(model, nn.Module):
            raise ParallelError(f"model is a {class_name(model)}, not an nn.Module")
        config = self.config
        if isinstance(config, MegatronFSDPConfig):
            megatron_fsdp.check_available()
            megatron_fsdp.refuse_mesh(self.mesh.get_mesh(("dp_shard", "cp")))
        else:  # before the values are read, which takes a while
            if isinstance(config, DDPConfig):  # a job gives a model its values later; here it has them
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
        """Return `loss`, a function or a module, compiled if the strategy says so."""
        compiled = self._compiled("loss")
        if compiled is None:
            return loss
        self.mesh.get_mesh(
            "dp"
        )  # made now: if the compiled loss made it, its second call would be compiled again
        return compile_loss(loss, compiled)

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Return `optimizer` with its step compiled, or managed by Megatron-FSDP, if the strategy says so.

        One that was made before `parallelize` gets the parameters that there are now; its groups and their options stay.

        Raises:
            ParallelError: it has a state of parameters that were replaced, can't be compiled or managed, or is torch's Muon
                on sharded weights.
        """
        model = self._parallel()
        if isinstance(self.config, MegatronFSDPConfig):
            if isinstance(optimizer, Muon):
                raise ParallelError(
                    "Muon needs full matrices, and Megatron-FSDP keeps shards of a flat buffer: take AdamW"
                )
            megatron_fsdp.register_optimizer(optimizer)
        else:
            carry_over(optimizer, model)
            _refuse_muon_on_shards(optimizer)
        compiled = self._compiled("optimizer")
        return optimizer if compiled is None else compile_optimizer(optimizer, compiled)

    def accumulate(self, *, last: bool = True) -> AbstractContextManager[None]:
        """Return the context for forward and backward of one micro batch; `last` marks the step's last one.

        What waits for the last is the strategy's (`fsdp_defer_grad_sync`, `defer_grad_sync`).
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
        """Run forwards without gradients, in evaluation mode; FSDP2 gathers the parameters once for all of them."""
        model = self._parallel()
        training = {module: module.training for module in model.modules()}
        model.eval()
        gathered = isinstance(self.config, FSDP2Config)
        try:
            with gradient_sync.unsharded(model) if gathered else torch.no_grad():
                yield
        finally:
            for module, mode in training.items():  # a frozen tower may have been in evaluation mode before
                module.training = mode

    def to_empty(self) -> None:
        """Give a model that was built on meta its memory: under CPU offload parameters on the CPU, buffers on the device.

        Its values come next, from its initialisation or a checkpoint.
        """
        model = self._parallel()
        offloads = isinstance(self.config, FSDP2Config) and self.config.enable_cpu_offload
        model.to_empty(device=torch.device("cpu") if offloads else self.device)
        if offloads:
            for module in model.modules():
                for name, buffer in module.named_buffers(recurse=False):
                    module._buffers[name] = buffer.to(self.device)

    def forget_gradients(self) -> None:
        """Drop all gradients of a step that is given up between two micro batches, those that wait to be summed too."""
        model = self._parallel()
        if isinstance(self.config, FSDP2Config):
            gradient_sync.forget_gradients(model)
        else:
            model.zero_grad()

    def count_tokens(self, labels: torch.Tensor) -> torch.Tensor:
        """Return how many of `labels` count on all ranks, for `cross_entropy`; labels of all micro batches of a step."""
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
        """Return this rank's part of the mean cross entropy over the whole batch; see `loss.cross_entropy`.

        Gradients are summed over ranks, so a loss is divided by the tokens of all of them, not of one's own.

        Args:
            logits: [..., vocabulary], sharded over it or not; or a `FusedLoss`'s deferred logits.
            labels: [...], the next tokens; -100 where one does not count.
            tokens: `count_tokens` of the step's labels; None where these are all of them.
            label_smoothing, z_loss: see `loss.cross_entropy`.
        """
        tokens = self.count_tokens(labels) if tokens is None else tokens
        return cross_entropy(logits, labels, tokens, label_smoothing=label_smoothing, z_loss=z_loss)

    def parallelism_report(self) -> ParallelismReport:
        """Return the report on the model; its `measuring` adds what one step does."""
        return ParallelismReport(self._parallel(), self.mesh, self.config)

    def clip_gradients(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip the model's gradients to `max_norm` and return their norm before, over all ranks; see `gradients`."""
        return gradients.clip_gradients(self._parallel().parameters(), max_norm, norm_type)

    def _compiled(self, component: str) -> Compile | None:
        """Return how `component` is compiled; None if it is not."""
        if isinstance(self.config, MegatronFSDPConfig):
            return None
        options = self.config.compile
        return options if options.enable and component in options.components else None

    def _parallel(self) -> nn.Module:
        if self._model is None:
            raise ParallelError("the manager has no model yet: call parallelize(model) first")
        return self._model


def _refuse_muon_on_shards(optimizer: torch.optim.Optimizer) -> None:
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    if isinstance(optimizer, torch.optim.Muon) and any(map(_is_sharded, parameters)):
        raise ParallelError(
            "torch.optim.Muon orthogonalises a sharded weight by DTensor's products, whose sums over the ranks are in "
            "bfloat16, so it steps otherwise than one process: take titanplans.parallel.build_optimizers(model, "
            'Optimizer(name="Muon"))'
        )


def _is_sharded(parameter: torch.Tensor) -> bool:
    """Whether several ranks hold a part of it each: a mesh of one rank shards nothing."""
    return isinstance(parameter, DTensor) and any(
        not placement.is_replicate() and parameter.device_mesh.size(dim) > 1
        for dim, placement in enumerate(parameter.placements)
    )


def _check_at_first_forward(model: nn.Module) -> None:
    def check(module: nn.Module, inputs: Any) -> None:
        gradients.check_no_meta(module)
        handle.remove()

    handle = model.register_forward_pre_hook(check, prepend=True)


def _device_type(asked: str | None) -> str:
    """Return the type of device that the process group's tensors can have.

    Raises:
        ParallelError: the group has no backend for `asked`.
    """
    if not dist.is_initialized():
        return asked or default_device_type()  # the mesh names the missing backend
    there = group_device_types()
    if asked is None:
        found = default_device_type()
        return found if found in there else "cpu"
    if asked not in there:
        raise ParallelError(
            f"device_type = {asked!r}, but the process group has backends for {', '.join(there)}: initialize it by "
            f"process_group({asked!r}), or leave device_type out"
        )
    return asked
