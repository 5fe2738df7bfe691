"""Models: their configs, construction on meta, initial weights and FLOPs; and models and inputs for a proof.

No plan is imported here.
"""

from titanplans.errors import ModelError
from titanplans.modeling.build import build
from titanplans.modeling.configs import adjusted, available, load_config, load_config_file
from titanplans.modeling.flops import count_flops, flops_of_blocks
from titanplans.modeling.initialize import initialize, move_buffers
from titanplans.modeling.samples import build_real, sample_inputs
from titanplans.modeling.user_model import user_model_config

__all__ = [
    "ModelError",
    "adjusted",
    "available",
    "build",
    "build_real",
    "count_flops",
    "flops_of_blocks",
    "initialize",
    "load_config",
    "load_config_file",
    "move_buffers",
    "sample_inputs",
    "user_model_config",
]
