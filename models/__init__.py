"""Which model: named flavors and config files, building on the meta device, initial weights, FLOPs, and
models and inputs for a proof.

How a model is split lives in `plans`, how the split is applied in `parallel`; neither is imported
here beyond `plans.errors`. PyTorch operations in place of FLA's GPU kernels are `models.kernels`.
"""

from models.build import build
from models.configs import available, load_config, load_config_file
from models.errors import ModelError
from models.flops import count_flops
from models.initialize import initialize
from models.samples import build_real, sample_inputs

__all__ = [
    "ModelError",
    "available",
    "build",
    "build_real",
    "count_flops",
    "initialize",
    "load_config",
    "load_config_file",
    "sample_inputs",
]
