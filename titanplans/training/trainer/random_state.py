"""The states of torch's random generators, which a checkpoint holds."""

import torch
from torchtitan.tools.utils import device_module, device_type


def get_rng_state() -> dict[str, torch.Tensor]:
    """The states of torch's generators on this rank: the CPU's, and the accelerator's if there is one."""
    state = {"cpu": torch.get_rng_state()}
    if device_type != "cpu":
        state[device_type] = device_module.get_rng_state()
    return state


def set_rng_state(state: dict[str, torch.Tensor]) -> None:
    """Set the generators to what `get_rng_state` returned."""
    torch.set_rng_state(state["cpu"])
    if device_type != "cpu":
        device_module.set_rng_state(state[device_type])
