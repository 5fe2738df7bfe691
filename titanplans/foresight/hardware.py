"""`find_gpu`, `gpu_of_device`: the GPUs of `hardware.toml`, and those of a user's file."""

from pathlib import Path
from typing import Any

import torch

from titanplans.config.options import Options, read_toml
from titanplans.errors import ConfigError, OptionError, did_you_mean
from titanplans.text import show

_FILE = Path(__file__).with_name("hardware.toml")


class Gpu(Options):
    """A GPU. The keys are described in hardware.toml."""

    name: str
    torch_names: tuple[str, ...] = ()
    memory_gib: float
    outside_gib: float
    gpus_per_node: int
    processors: int
    shared_memory: int
    bfloat16_tflops: float
    float8_tflops: float
    float32_tflops: float
    memory_gb_s: float
    link_gb_s: float
    network_gb_s: float
    product_efficiency: float
    attention_efficiency: float
    host_us: float

    def peak(self, dtype: torch.dtype) -> float:
        """Return the multiplications and additions per second of matrix products of `dtype`, by the data sheet."""
        if dtype.itemsize == 1:
            return self.float8_tflops * 1e12
        return (self.bfloat16_tflops if dtype.itemsize == 2 else self.float32_tflops) * 1e12

    @property
    def usable(self) -> int:
        """The bytes that torch's allocator can get."""
        return int((self.memory_gib - self.outside_gib) * 2**30)


def find_gpu(name: str, file: Path | None = None) -> Gpu:
    """Return the GPU called `name`, from `file` or from titanplans' hardware.toml.

    Raises:
        ConfigError: there is no such GPU, or a key of its table is missing, unknown or of another type.
    """
    own: dict[str, Any] = {} if file is None else read_toml(file, "hardware file")
    tables = read_toml(_FILE) | own
    if name not in tables:
        raise ConfigError(
            f"--gpu {name}: no such GPU; {did_you_mean(name, tables)}. Add it in a file: --hardware FILE.toml"
        )
    where, table = f"{file if name in own else _FILE}, [{name}]", tables[name]
    if not isinstance(table, dict):
        raise ConfigError(
            f"{where}: {table!r} is not a table; write the keys of titanplans' hardware.toml under it"
        )
    if "like" in table:
        like, others = table["like"], {key: value for key, value in table.items() if key != "like"}
        # A table with `like` has only some of the keys, so no other table can be like it.
        complete = [each for each, keys in tables.items() if isinstance(keys, dict) and "like" not in keys]
        if like not in complete:
            raise ConfigError(
                f"{where}: like = {show(like)}: no such GPU; {did_you_mean(str(like), complete)}"
            )
        table = tables[like] | {"torch_names": []} | others
    if missing := sorted(Gpu.model_fields.keys() - table.keys() - {"name", "torch_names"}):
        raise ConfigError(
            f"{where}: {', '.join(missing)} is missing; hardware.toml of titanplans describes the keys"
        )
    try:
        return Gpu(name=name, **table)
    except OptionError as error:
        raise ConfigError(f"{where}: {error}") from error


def name_of_device(device_name: str) -> str | None:
    """Return the GPU of titanplans that torch calls `device_name`; None if there is none.

    The names must be equal: "NVIDIA H100 PCIe" has another bandwidth than H100, and "NVIDIA H100 80GB HBM3 MIG 1g.10gb" is
    only a slice of an H100.
    """
    tables = read_toml(_FILE)
    return next((name for name, keys in tables.items() if device_name in keys["torch_names"]), None)


def gpu_of_device(device_name: str, memory: int) -> Gpu:
    """Return the GPU of titanplans with this name in torch, and with this memory.

    Args:
        device_name: what `torch.cuda.get_device_name` returns.
        memory: the device's memory in bytes, of `torch.cuda.get_device_properties`.

    Raises:
        ConfigError: there is no such GPU.
    """
    name = name_of_device(device_name)
    if name is None:
        raise ConfigError(
            f'"{device_name}": no GPU of titanplans\' hardware.toml has this name. Describe it in a file: titanplans '
            "estimate JOB.toml --hardware FILE.toml --gpu NAME"
        )
    return find_gpu(name).replace(memory_gib=memory / 2**30)
