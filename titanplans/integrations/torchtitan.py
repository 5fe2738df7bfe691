"""Models of transformers and flash-linear-attention in torchtitan's own trainer: `model_spec`.

def gla_340m() -> Trainer.Config:                    # in my_package/config_registry.py
    return Trainer.Config(model_spec=model_spec("gla", "340M"), ...)

torchrun ... -m torchtitan.train --module my_package --config gla_340m
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torchtitan.protocols.model import BaseModel
from torchtitan.protocols.model_spec import ModelSpec

from titanplans import modeling
from titanplans.parallel import ParallelError, parallelize
from titanplans.plan.custom import PlanSource
from titanplans.split.stages.trace import logits_of, without_cache


class LanguageModelOfPlan(BaseModel):
    """A causal language model with the interface that torchtitan's trainer expects of its models."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseModel.Config):
        """The model: a name and a flavor of `titanplans.modeling`, and overridden fields of its config."""

        name: str
        flavor: str
        overrides: Mapping[str, Any] = field(default_factory=dict)

        def update_from_config(self, *, config: Any, **kwargs: Any) -> None:
            """Refuse options of the trainer's `config` that a plan's model can't honour.

            Raises:
                ParallelError: the spmd_backend is not "partial_dtensor".
            """
            if config.parallelism.spmd_backend != "partial_dtensor":
                raise ParallelError(
                    f"parallelism.spmd_backend = {config.parallelism.spmd_backend!r}: the plan splits the modules; set it "
                    'to "partial_dtensor"'
                )

        def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
            """Return the number of parameters, and the FLOPs per token of a training step."""
            return modeling.count_flops(model.lm, seq_len)  # type: ignore[arg-type]

    def __init__(self, config: Config):
        super().__init__()
        self.lm = modeling.build(modeling.load_config(config.name, config.flavor, **config.overrides))
        self._without_cache = without_cache(self.lm)

    def forward(self, tokens: torch.Tensor, **extras: Any) -> torch.Tensor:
        """Return the logits [batch, sequence, vocabulary] of token ids [batch, sequence]."""
        return logits_of(self.lm(input_ids=tokens, **self._without_cache))

    def init_states(self, *, buffer_device: torch.device | None = None) -> None:
        """Initialise every parameter and buffer with torch's seed; `buffer_device` is set with CPU offload."""
        modeling.initialize(self.lm, seed=torch.initial_seed())
        if buffer_device is not None:
            modeling.move_buffers(self.lm, buffer_device)

    def verify_module_protocol(self) -> None:
        """Do nothing: modules of transformers do not follow torchtitan's protocol, and plans do not need it."""


def _parallelize(model: LanguageModelOfPlan, *, plan: PlanSource, derive: bool, **sections: Any) -> nn.Module:
    parallelize(model.lm, plan=plan, derive=derive, **sections)
    return model


def model_spec(
    name: str, flavor: str, *, plan: PlanSource = None, derive: bool = False, **overrides: Any
) -> ModelSpec:
    """Return torchtitan's description of a named model, whose `parallelize_fn` applies the model's plan.

    The documents of a sequence see each other, since the loader's positions are not used.

    Args:
        name, flavor: a name and a flavor in `titanplans.modeling.available`.
        plan, derive: arguments of `parallelize`. By default the plan that is registered for the model.
        overrides: fields of the model's config, such as `vocab_size`.
    """
    return ModelSpec(
        name=name,
        flavor=flavor,
        model=LanguageModelOfPlan.Config(name=name, flavor=flavor, overrides=overrides),
        parallelize_fn=partial(_parallelize, plan=plan, derive=derive),
        pipelining_fn=None,
        post_optimizer_build_fn=None,
        state_dict_adapter=None,
    )
