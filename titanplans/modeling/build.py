"""From a config to a causal language model without memory: every parameter on the meta device.

Values come later (`titanplans.modeling.initialize`), after the model was split and given memory.
"""

import copy
import traceback
from pathlib import Path

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from titanplans.errors import ModelError
from titanplans.modeling.own import construct_own, is_own
from titanplans.precision.kept_dtypes import keeps_float32


def build(config: PretrainedConfig) -> PreTrainedModel:
    """The causal language model of `config`, parameters and buffers on the meta device.

    Parameters have the default dtype at the time of the call, whatever dtype the config names; in 16 bits, what the model's
    class keeps in float32 is float32, as `from_pretrained` has it. The model's config is a copy with `use_cache=False`:
    training keeps no key/value cache or recurrent state from one step to the next. Tied weights are one parameter.

    On a CPU without flash-attn, FLA's softmax attention can't be constructed before
    `kernels.install("cpu")`.

    Raises:
        ModelError: the architecture has no causal LM, a size does not fit another, a value is none that its constructor
            takes, or an optional package such as flash-attn is missing.
    """
    config = copy.deepcopy(config)
    config.get_text_config().use_cache = False
    return construct(config, torch.device("meta"), torch.get_default_dtype())


def construct(config: PretrainedConfig, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """Run the model's own constructor with `device` and `dtype` as defaults. Sets `config.dtype`."""
    kind = config.model_type
    if is_own(config):
        return construct_own(config, device, dtype)  # type: ignore[return-value]
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(
            f"model_type {kind!r} has no causal language model, only such a model can be trained"
        )
    try:
        with device:
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    except ImportError as error:
        # A failed `import` names its module. A constructor that misses an optional package raises without a name.
        if error.name is not None:
            raise
        raise ModelError(
            f"model_type {kind!r} needs a package that is not installed ({' '.join(str(error).split())}); softmax "
            "attention needs flash-attn on a GPU, or kernels.install('cpu') before the model is built"
        ) from error
    # The constructors check their sizes with asserts as well as with errors. What they don't check: a name that is in no
    # table of theirs, and values that nothing can be computed with.
    except (AssertionError, ValueError, KeyError, ArithmeticError, RuntimeError, TypeError) as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        said = f"{type(error).__name__}: {' '.join(str(error).split())}"
        if isinstance(error, KeyError) and (fields := _fields_of(config, error.args[0])):
            said = f"it knows no {' = '.join(fields)} = {error.args[0]!r}"
        raise ModelError(
            f"model_type {kind!r} can't be built with the values of its config: {said} "
            f"({'/'.join(Path(last.filename).parts[-3:])}:{last.lineno})"
        ) from error
    kept = keeps_float32(model, dtype)
    for name, tensor in model.state_dict(keep_vars=True).items():
        if kept(name):
            tensor.data = tensor.data.float()
    return model


def _fields_of(config: PretrainedConfig, value: object) -> list[str]:
    """Return the fields of `config` that have this value."""
    values = config.get_text_config().to_dict() | config.to_dict()
    return [name for name, own in values.items() if own == value]
