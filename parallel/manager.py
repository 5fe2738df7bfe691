"""`ParallelManager`: everything around a plan, for people with a training loop of their own.

    with process_group():
        manager = ParallelManager(FSDP2Config(), Degrees(tp=2))
        model = manager.parallelize(model)

It holds the meshes and one model, and adds nothing to them: what it does is in `order`, `gradients`,
`gradient_sync`, `loss`, `ddp` and `megatron_fsdp`, each of use without it.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch
from torch import nn

from parallel import ddp, gradient_sync, gradients, megatron_fsdp
from parallel.compile import compile_loss, compile_optimizer
from parallel.degrees import Degrees, refuse_unsupported
from parallel.errors import ParallelError
from parallel.loss import count_tokens, cross_entropy
from parallel.mesh import Mesh
from parallel.order import apply_strategy
from parallel.process_group import default_device_type
from parallel.strategies import Compile, DDPConfig, FSDP2Config, MegatronFSDPConfig, Strategy
from parallel.values import check_equal_values

F = TypeVar("F", bound=Callable[..., Any])


class ParallelManager:
    """The meshes of a job and its one model, parallelised as `config` says.

    Building one is collective: every rank does so, inside a process group (`process_group`).

    Args:
        config: the strategy, with its options.
        degrees: how many ranks to each axis; None gives all of them to data parallelism.
        device_type: "cuda", "cpu", …; None for the accelerator that torch sees, or else the CPU.

    Raises:
        ParallelError: the degrees don't fit the number of ranks, or not the strategy.
    """

    def __init__(self, config: Strategy, degrees: Degrees | None = None, *, device_type: str | None = None):
        self.config = config
        if degrees is None:
            degrees = Degrees(dp_replicate=-1, dp_shard=1) if isinstance(config, DDPConfig) else Degrees()
        self.mesh = Mesh(degrees, device_type or default_device_type())
        refuse_unsupported(self.mesh)
        if isinstance(config, DDPConfig):
            ddp.refuse_degrees(self.mesh)
        self._model: nn.Module | None = None

    @property
    def device(self) -> torch.device:
        """This rank's device."""
        kind = self.mesh.world_mesh.device_type
        return torch.empty(0, device=kind).device

    def parallelize(self, model: nn.Module) -> nn.Module:
        """Return `model` parallelised: itself, changed in place, or under Megatron-FSDP what is wrapped around it.

        Build the optimizer on the result's parameters. A model on meta has no values yet: give it some
        (`to_empty(device=manager.device)`, then its initialisation or a checkpoint) before its first forward,
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
            raise ParallelError("this manager has a model already: take one manager a model")
        check_equal_values(model, self.device)
        if isinstance(self.config, MegatronFSDPConfig):
            axes = ("dp_replicate", "dp_shard", "tp")
            model = megatron_fsdp.apply_megatron_fsdp(model, self.mesh.get_mesh(axes), self.config)
        else:
            apply_strategy(model, self.mesh, self.config)
            if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
                _check_at_first_forward(model)
        self._model = model
        return model

    def prepare_loss(self, loss: F) -> F:
        """Return `loss`, a function or a module, compiled if the strategy says so."""
        compiled = self._compiled("loss")
        return loss if compiled is None else compile_loss(loss, compiled)

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Return `optimizer` with its step compiled, or managed by Megatron-FSDP, if the strategy says so."""
        if isinstance(self.config, MegatronFSDPConfig):
            megatron_fsdp.register_optimizer(optimizer)
        compiled = self._compiled("optimizer")
        return optimizer if compiled is None else compile_optimizer(optimizer, compiled)

    def accumulate(self, *, last: bool = True) -> AbstractContextManager[None]:
        """Return the context for forward and backward of one micro batch, of which `last` is the step's last.

        What waits for the last is the strategy's (`defer_fsdp_grad_sync`, `defer_grad_sync`).
        """
        model, config = self._parallel(), self.config
        if isinstance(config, FSDP2Config):
            return gradient_sync.accumulate(
                model, last=last, defer=config.defer_fsdp_grad_sync, keep_gathered=config.keep_gathered
            )
        if isinstance(config, DDPConfig):
            return ddp.accumulate(model, last=last, defer=config.defer_grad_sync)
        return megatron_fsdp.accumulate(model, last=last)

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Run forwards without gradients, in evaluation mode; FSDP2 gathers the parameters once for all of them."""
        model = self._parallel()
        training = model.training
        model.eval()
        gathered = isinstance(self.config, FSDP2Config)
        try:
            with gradient_sync.unsharded(model) if gathered else torch.no_grad():
                yield
        finally:
            model.train(training)

    def count_tokens(self, labels: torch.Tensor) -> torch.Tensor:
        """Return how many of `labels` count on all ranks, for `cross_entropy`; labels of all micro batches of a step."""
        return count_tokens(labels, self.mesh.get_mesh("dp"))

    def cross_entropy(
        self, logits: torch.Tensor, labels: torch.Tensor, tokens: int | torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return this rank's part of the mean cross entropy over the whole batch; see `loss.cross_entropy`.

        Gradients are summed over ranks, so a loss is divided by the tokens of all of them, not of one's own.

        Args:
            logits: [..., vocabulary], sharded over it or not.
            labels: [...], the next tokens; -100 where one does not count.
            tokens: `count_tokens` of the step's labels; None where these are all of them.
        """
        return cross_entropy(logits, labels, self.count_tokens(labels) if tokens is None else tokens)

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


def _check_at_first_forward(model: nn.Module) -> None:
    def check(module: nn.Module, inputs: Any) -> None:
        gradients.check_no_meta(module)
        handle.remove()

    handle = model.register_forward_pre_hook(check, prepend=True)
