"""`build`: construct the causal language model of a config on the meta device.

`titanplans.modeling.initialize` sets the initial values, after the model is split and materialised.
"""

import copy
import traceback
from pathlib import Path

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from titanplans.errors import ModelError
from titanplans.modeling.user_model import construct_user_model, is_user_model
from titanplans.precision.kept_dtypes import keeps_float32


def build(config: PretrainedConfig) -> PreTrainedModel:
    """Return the causal language model of `config`, with parameters and buffers on the meta device.

    Parameters have torch's default dtype, not the config's. If that dtype has 16 bits, tensors that the model's class keeps
    in float32 are float32, as in `from_pretrained`. The model's config is a copy with `use_cache=False`, since training
    keeps no key/value cache or recurrent state from one step to the next. Tied weights are one parameter.

    On a CPU without flash-attn, FLA's softmax attention can be constructed only after `kernels.install("cpu")`.

    Raises:
        ModelError: the architecture has no causal LM, sizes are inconsistent, the model's constructor refuses a value, or
            an optional package such as flash-attn is missing.
    """
    config = copy.deepcopy(config)
    config.get_text_config().use_cache = False
    return construct(config, torch.device("meta"), torch.get_default_dtype())


def construct(config: PretrainedConfig, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """Run the constructor of the model with `device` and `dtype` as defaults. Sets `config.dtype`."""
    kind = config.model_type
    if is_user_model(config):
        return construct_user_model(config, device, dtype)  # type: ignore[return-value]
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(
            f"model_type {kind!r} has no causal language model, but only such a model can be trained"
        )
    try:
        with device:
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    except ImportError as error:
        # Errors of `import` have a name; those that a constructor raises for a missing optional package have none.
        if error.name is not None:
            raise
        raise ModelError(
            f"model_type {kind!r} needs a package that is not installed ({' '.join(str(error).split())}); softmax "
            "attention needs flash-attn on a GPU, or kernels.install('cpu') before the model is built"
        ) from error
    # Constructors check sizes with asserts and errors. A KeyError means an unknown name, e.g. of an activation. The other
    # errors here are caused by values that a constructor does not check.
    except (AssertionError, ValueError, KeyError, ArithmeticError, RuntimeError, TypeError) as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        if isinstance(error, KeyError) and (fields := _fields_of(config, error.args[0])):
            reason = f"it knows no {' = '.join(fields)} = {error.args[0]!r}"
        raise ModelError(
            f"model_type {kind!r} can't be built with the values of its config: {reason} "
            f"({'/'.join(Path(last.filename).parts[-3:])}:{last.lineno})"
        ) from error
    is_kept = keeps_float32(model, dtype)
    for name, tensor in model.state_dict(keep_vars=True).items():
        if is_kept(name):
            tensor.data = tensor.data.float()
    return model


def _fields_of(config: PretrainedConfig, value: object) -> list[str]:
    """Return the names of the fields of `config` that have this value."""
    values = config.get_text_config().to_dict() | config.to_dict()
    return [name for name, field_value in values.items() if field_value == value]
