"""Units of experts that ranks share out: FSDP shards each over the ranks that hold the same experts, and over no others."""

from collections.abc import Sequence
from dataclasses import replace

from torch import nn
from torch.distributed.tensor import DTensor

from titanplans.parallel.fsdp.units import FSDPUnit
from titanplans.plan.decoder import within


def split_experts(model: nn.Module, units: Sequence[FSDPUnit]) -> list[FSDPUnit]:
    """Return `units`, each with the modules in it that hold experts of an expert-parallel mesh as units inside."""
    experts = [name for name, module in model.named_modules() if _is_shared_out(module)]
    done, left = [], dict.fromkeys(experts)
    for unit in sorted(units, key=lambda unit: -max(name.count(".") for name in unit.names)):
        own = [name for name in left if any(within(name, outer) for outer in unit.names)]
        for name in own:
            del left[name]
        inside = tuple(FSDPUnit((name,), "experts", unit.last) for name in own)
        done.append(replace(unit, inner=(*inside, *unit.inner)))
    return sorted(done, key=lambda unit: [u.names for u in units].index(unit.names))


def _is_shared_out(module: nn.Module) -> bool:
    held = [param for param in module._parameters.values() if isinstance(param, DTensor)]
    return any("ep" in (param.device_mesh.mesh_dim_names or ()) for param in held)
