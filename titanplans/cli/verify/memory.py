"""Whether a proof fits into memory, asked before it is begun."""

import os
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor.placement_types import Replicate

from titanplans.cli.verify.group import Ranks
from titanplans.errors import VerifyError, either
from titanplans.proof.sample import vocabulary_size
from titanplans.tensor_parallel.decoder import find_decoder
from titanplans.tensor_parallel.plan import Plan
from titanplans.tensor_parallel.styles import Style

# Peaks over what the process had before, measured at 11 sizes, at which they gave -4% to +21%. The whole model's step:
_WHOLE = 10.3  # copies of the weights: values, gradients, moments, before and after, units, and one more of each to compare
_WHOLE_LARGEST = 4.5  # of the largest parameter, for what is computed of one at a time
_WHOLE_LOGITS = 4.0  # of the logits
# A case beside what is kept of it:
_SPLIT = 9.0  # copies of the weights
_EACH_LARGEST = 1.0  # on each simulated rank: the largest parameter, gathered to be compared,
_EACH_LOGITS = 4.0  # the logits, where they are whole,
_EACH_REPLICATED = 3.5  # and what is replicated, with gradients and moments


def check_memory(
    model: nn.Module, split: dict[int, Plan], *, tokens: int, dtype: torch.dtype, ranks: Ranks, built: bool
) -> None:
    """Refuse a proof that needs more memory than there is.

    Args:
        model: the whole one; on meta, or real.
        split: its styles by degree.
        tokens: in the batch.
        dtype: of the proof.
        ranks: where it runs.
        built: the model's own weights are in memory already.

    Raises:
        VerifyError: with what it needs, what there is, and the remedies.
    """
    sizes = {name: p.numel() * dtype.itemsize for name, p in model.named_parameters()}
    logits = tokens * vocabulary_size(model) * dtype.itemsize
    weights, largest = sum(sizes.values()), max(sizes.values(), default=0)
    needed = _WHOLE * weights + _WHOLE_LARGEST * largest + _WHOLE_LOGITS * logits
    for degree, styles in split.items():
        replicated = sum(size for name, size in sizes.items() if _is_replicated(name, model, styles))
        each = _EACH_LARGEST * largest + _EACH_LOGITS * logits + _EACH_REPLICATED * replicated
        needed = max(needed, _SPLIT * weights + (degree if ranks.group is None else 1) * each)
    needed -= weights * built
    if ranks.group is not None and ranks.device.type == "cpu":
        needed *= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    free = available_bytes(ranks.device)
    if needed > free:
        remedies = ["fewer --layers"] if len(find_decoder(model, required=False).blocks) > 1 else []
        remedies += ["a smaller --vocab-size", "a smaller flavor"]
        raise VerifyError(
            f"the proof of {sum(p.numel() for p in model.parameters()):,} parameters in {str(dtype).removeprefix('torch.')} "
            f"needs about {needed / 1e9:,.1f} GB, and {free / 1e9:,.1f} GB are free: {either(remedies)}"
        )


def _is_replicated(name: str, model: nn.Module, styles: Plan) -> bool:
    path, _, key = name.rpartition(".")
    style = styles.get(path)
    if not isinstance(style, Style):
        return False
    return isinstance(style.layouts(model.get_submodule(path))[key].placement, Replicate)


def available_bytes(device: torch.device) -> int:
    """Return the memory that a process can still take: of a GPU's, or of the machine's and of its container's limit."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    found = []
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        lines = dict(line.split(":") for line in meminfo.read_text().splitlines())
        found.append(int(lines["MemAvailable"].split()[0]) * 1024)
    else:
        # All there is, used or not: macOS says no more.
        found.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    group = Path("/sys/fs/cgroup")  # of this container, where there is one
    limit = group / "memory.max"
    if limit.exists() and (most := limit.read_text().strip()) != "max":
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        used = int((group / "memory.current").read_text()) - int(
            stat["inactive_file"]
        )  # a cache that gives way
        found.append(int(most) - used)
    return min(found)
