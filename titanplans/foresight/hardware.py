"""`find_gpu`: the GPUs of `hardware.toml`, and those of a user's file."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titanplans.config.options import read_toml
from titanplans.errors import ConfigError, did_you_mean

_FILE = Path(__file__).with_name("hardware.toml")


@dataclass(frozen=True)
class Gpu:
    """A GPU. The keys are described in hardware.toml."""

    name: str
    memory_gib: float
    outside_gib: float
    gpus_per_node: int

    @property
    def usable(self) -> int:
        """The bytes that torch's allocator can get."""
        return int((self.memory_gib - self.outside_gib) * 2**30)


def find_gpu(name: str, file: Path | None = None) -> Gpu:
    """Return the GPU called `name`, of `file` or of titanplans.

    Raises:
        ConfigError: there is no such GPU, or its table lacks a key or has an unknown one.
    """
    tables: dict[str, Any] = read_toml(_FILE) | ({} if file is None else read_toml(file))
    if name not in tables:
        raise ConfigError(
            f"--gpu {name}: no such GPU; {did_you_mean(name, tables)}. Add it in a file: --hardware FILE.toml"
        )
    try:
        return Gpu(name, **tables[name])
    except TypeError as error:
        keys = ", ".join(Gpu.__dataclass_fields__.keys() - {"name"})
        raise ConfigError(f"{file or _FILE}, [{name}]: {error}; the keys are {keys}") from error
