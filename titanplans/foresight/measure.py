"""`measure`: the keys of hardware.toml, measured on the ranks of a process group. `as_toml` writes them.

Calls of operators are timed, and a key gets the value with which `seconds_of` gives the time that was measured. So what the
formulas of `time.py` leave out, such as the efficiency of NCCL, is a part of the values.
"""

import json
import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from titanplans.errors import ParallelError, RunError
from titanplans.foresight.hardware import Gpu, find_gpu, name_of_device
from titanplans.foresight.time import seconds_of
from titanplans.observe.work import Work, work_of
from titanplans.parallel.mesh.process_group import Process
from titanplans.split.raw_collectives import Group, all_gather, group_of, reduce_scatter
from titanplans.text import counted, format_bytes, paragraph
from titanplans.torch_private.dispatch import TorchDispatchMode, scaled_mm

_ASSUMED = "H100"
"""The GPU whose values are assumed for what can't be measured on a GPU without a data sheet in hardware.toml."""
_WARM_UP = 3
_CALLS = 4
"""Calls of one timing: while the GPU runs the first of them, the host issues the others."""


@dataclass(frozen=True)
class MeasureSizes:
    """The sizes of what is timed."""

    products: Sequence[tuple[int, int, int]]
    """Tokens, inputs and outputs of linear layers, of which the products of the forward and of the backward are timed."""
    attention: Sequence[tuple[int, int, int, int]]
    """Sequences, heads, tokens of a sequence, and the width of a head."""
    memory: Sequence[int]
    """Bytes of tensors that are copied."""
    collectives: Sequence[int]
    """Bytes of full tensors that are gathered and reduced."""
    layers: int
    """Number of tiny layers, whose operators the host issues."""
    repetitions: int
    """How often each call is timed; the median counts."""


ON_A_GPU = MeasureSizes(
    # Projections of blocks with a hidden size of 2,048 and 4,096, and their MLPs.
    products=[(16384, 2048, 2048), (16384, 2048, 5632), (8192, 4096, 4096), (8192, 4096, 14336)],
    attention=[(4, 32, 2048, 128), (1, 32, 8192, 128)],
    memory=[2**28, 2**30],
    collectives=[2**26, 2**29],
    layers=16,
    repetitions=20,
)


class MeasuredKey(NamedTuple):
    """The value of a key of hardware.toml, and where it is from."""

    value: float
    source: str


@dataclass(frozen=True)
class TimedCall:
    """A call of operators that was timed."""

    works: tuple[Work, ...]
    """What its operators do, as a forecast counts it."""
    seconds: float
    """The median, on the rank where it is the longest: in a step all ranks wait for that one."""


def measure(process: Process, name: str, sizes: MeasureSizes = ON_A_GPU) -> dict[str, MeasuredKey]:
    """Measure the keys of hardware.toml that depend on how fast something is. Every rank calls this, and gets the same keys.

    Args:
        process: this rank of the default process group.
        name: the GPU, as torch calls it.
        sizes: the sizes of what is timed.

    Raises:
        ParallelError: the machines have different numbers of ranks, or their ranks are not numbered in order.
        RunError: as in `value_of`.
    """
    mesh = _mesh(process)
    measurement = _Measurement(process, name, sizes)
    with torch.autograd.set_multithreading_enabled(False):  # as in a job
        measurement.products()
        measurement.attention()
        measurement.memory()
        measurement.collectives(mesh)
        measurement.host()
    return measurement.keys


class _Measurement:
    """The keys that have been measured.

    Attributes:
        gpu: a GPU with these keys, on which everything else takes no time.
        keys: the keys, and where they are from.
    """

    def __init__(self, process: Process, name: str, sizes: MeasureSizes):
        self.process, self.name, self.sizes = process, name, sizes
        self.sheet = name_of_device(name)
        self.like = find_gpu(self.sheet or _ASSUMED)
        instant = dict.fromkeys(("memory_gb_s", "link_gb_s", "network_gb_s"), math.inf)
        self.gpu = self.like.model_copy(update=instant)
        self.keys: dict[str, MeasuredKey] = {}
        self._put("gpus_per_node", process.local_world_size, "the ranks of a machine")

    def products(self) -> None:
        """Measure the peaks, and what products reach of them in bfloat16."""
        device, sizes = self.process.device, self.sizes
        shapes = f"{_shapes(sizes.products)} (tokens x inputs x outputs)"
        of_layers = f"the products of linear layers' forward and backward, {shapes}"
        in_bfloat16, in_float32 = (
            [self._timed(call) for shape in sizes.products for call in _products(device, shape, dtype)]
            for dtype in (torch.bfloat16, torch.float32)
        )
        if self.sheet is not None:
            source = f"from the data sheet, as {self.sheet} in hardware.toml: no product reaches the peak"
            self._put("bfloat16_tflops", self.like.bfloat16_tflops, source)
        else:
            fastest = max(sum(work.flops for work in call.works) / call.seconds for call in in_bfloat16)
            source = f"the fastest of product_efficiency's products, since hardware.toml has no data sheet of {self.name}"
            self._put("bfloat16_tflops", fastest / 1e12, source)
        self._solve(
            "product_efficiency", in_bfloat16, f"{of_layers}, in bfloat16, relative to bfloat16_tflops"
        )
        precision = torch.get_float32_matmul_precision()
        what = f"{of_layers}, in float32 of {precision} precision, divided by product_efficiency"
        self._solve("float32_tflops", in_float32, what)
        if (dtype := float8_of(device)) is None:
            source = "as bfloat16_tflops: the GPU has no products in float8"
            self._put("float8_tflops", self.gpu.bfloat16_tflops, source)
        else:
            in_float8 = [self._timed(_float8_product(device, shape, dtype)) for shape in sizes.products]
            what = f"the products of the forward alone, {shapes}, in float8, divided by product_efficiency"
            self._solve("float8_tflops", in_float8, what)

    def attention(self) -> None:
        """Measure what fused attention reaches of the peak."""
        calls = [self._timed(_attention(self.process.device, shape)) for shape in self.sizes.attention]
        shapes = f"{_shapes(self.sizes.attention)} (sequences x heads x tokens x width)"
        what = f"forward and backward of causal attention in bfloat16, {shapes}, relative to bfloat16_tflops"
        self._solve("attention_efficiency", calls, what)

    def memory(self) -> None:
        """Measure the bandwidth of the GPU's memory."""
        calls = [self._timed(_random(self.process.device, size // 2).clone) for size in self.sizes.memory]
        self._solve("memory_gb_s", calls, f"copies of {_joined(map(format_bytes, self.sizes.memory))}")

    def collectives(self, mesh: DeviceMesh) -> None:
        """Measure the links of a machine, and the network, if there are several machines."""
        process, like = self.process, self.like
        what = f"all-gather and reduce-scatter of {_joined(map(format_bytes, self.sizes.collectives))}"
        assumed = f"{'as' if self.sheet else 'assumed as'} {like.name} in hardware.toml: not measured"
        if process.local_world_size > 1:
            calls = self._timed_collectives(mesh["gpu"])
            self._solve("link_gb_s", calls, f"{what} over the GPUs of a machine")
        else:
            self._put("link_gb_s", like.link_gb_s, f"{assumed}, since there is one GPU a machine")
        if (machines := mesh.size(0)) > 1:
            calls = self._timed_collectives(init_device_mesh(process.device.type, (process.world_size,)))
            self._solve("network_gb_s", calls, f"{what} over {machines} machines")
        else:
            self._put("network_gb_s", like.network_gb_s, f"{assumed}, since there is one machine")

    def host(self) -> None:
        """Measure the time in which Python issues an operator."""
        count, seconds = _host_time(self.process.device, self.sizes)
        what = f"{count} operators of tiny layers' forward and backward, issued without waiting for the GPU"
        self._put("host_us", seconds / count * 1e6, f"measured: {what}; {self._how}")

    @property
    def _how(self) -> str:
        ranks = counted(self.process.world_size, "GPU")
        return f"median of {self.sizes.repetitions} timings, on the slowest of {ranks}"

    def _solve(self, key: str, calls: Sequence[TimedCall], what: str) -> None:
        # A ring over several machines is as fast as the slower of its links and its network: here that is the network.
        gpu = self.gpu.model_copy(update={"link_gb_s": math.inf}) if key == "network_gb_s" else self.gpu
        self._put(key, value_of(key, calls, gpu), f"measured: {what}; {self._how}")

    def _put(self, key: str, value: float, source: str) -> None:
        self.keys[key] = MeasuredKey(value, source)
        self.gpu = self.gpu.model_copy(update={key: value})

    def _timed(self, call: Callable[[], object]) -> TimedCall:
        return timed(call, self.process.device, self.sizes.repetitions)

    def _timed_collectives(self, mesh: DeviceMesh) -> list[TimedCall]:
        group, sizes, device = group_of(mesh), self.sizes.collectives, self.process.device
        return [self._timed(call) for size in sizes for call in _collectives(device, size, group)]


def value_of(key: str, calls: Sequence[TimedCall], gpu: Gpu) -> float:
    """Return the value of `key`, a rate, with which the computed times of the calls on `gpu` sum to the measured time.

    Raises:
        RunError: the calls took less time than they would with an infinite rate.
    """

    def seconds_with(value: float) -> float:
        changed = gpu.model_copy(update={key: value})
        return sum(seconds_of(work, changed) for call in calls for work in call.works)

    measured, least = sum(call.seconds for call in calls), seconds_with(math.inf)
    if measured <= least:
        raise RunError(
            f"{key}: what was timed took {measured:.2g} s, and the estimate counts {least:.2g} s besides what depends on "
            "this key, so it can't be measured with these sizes; measure again, or with larger ones"
        )
    # The time is `least` plus a part that is proportional to 1 / rate.
    return (seconds_with(1.0) - least) / (measured - least)


def device_keys(device: torch.device) -> dict[str, MeasuredKey]:
    """Return the keys that a CUDA or ROCm device reports. Called after `measure`, when the libraries have their memory."""
    properties = torch.cuda.get_device_properties(device)
    source = "reported by torch.cuda.get_device_properties"
    # ROCm has no limit that a kernel opts in to.
    limit = "shared_memory_per_block" if torch.version.hip else "shared_memory_per_block_optin"
    free, total = torch.cuda.mem_get_info(device)
    outside = _slowest(total - free - torch.cuda.memory_reserved(device), device)
    return {
        "memory_gib": MeasuredKey(properties.total_memory / 2**30, f"{source}: total_memory"),
        "outside_gib": MeasuredKey(
            outside / 2**30,
            "measured: used memory of the GPU, without that of torch's allocator, after products and collectives; of all "
            "processes, so right on a GPU that nothing else uses",
        ),
        "processors": MeasuredKey(properties.multi_processor_count, f"{source}: multi_processor_count"),
        "shared_memory": MeasuredKey(getattr(properties, limit), f"{source}: {limit}"),
    }


def as_toml(name: str, keys: dict[str, MeasuredKey], title: str) -> str:
    """Return the table of a GPU, as `find_gpu` reads it: the keys in the order of hardware.toml, each below its source."""
    lines = [f"# {title}", f"[{json.dumps(name)}]"]
    for key in [each for each in Gpu.model_fields if each in keys]:
        value, source = keys[key]
        text = str(value) if isinstance(value, int) else f"{value:.6g}"
        lines += [paragraph(source, "# ", width=120), f"{key} = {text}"]
    return "\n".join(lines) + "\n"


def float8_of(device: torch.device) -> torch.dtype | None:
    """Return the dtype of the device's float8 products; None if it has none."""
    if device.type == "cpu":  # slow, but right for a test
        return torch.float8_e4m3fn
    if torch.version.hip:
        architecture = torch.cuda.get_device_properties(device).gcnArchName.partition(":")[0]
        return {"gfx942": torch.float8_e4m3fnuz, "gfx950": torch.float8_e4m3fn}.get(architecture)
    return torch.float8_e4m3fn if torch.cuda.get_device_capability(device) >= (8, 9) else None


class _Works(TorchDispatchMode):
    """Collects what the operators of the body do."""

    def __init__(self) -> None:
        super().__init__()
        self.works: list[Work] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if (work := work_of(func, args, kwargs or {}, result)) is not None:
            self.works.append(work)
        return result


def timed(call: Callable[[], object], device: torch.device, repetitions: int) -> TimedCall:
    """Time a call of operators. Every rank times the same calls in the same order."""
    with _Works() as recorded:
        call()
    for _ in range(_WARM_UP):
        call()
    seconds = statistics.median(_seconds(call, device) for _ in range(repetitions))
    return TimedCall(tuple(recorded.works), _slowest(seconds, device))


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    if device.type == "cpu":
        start = time.perf_counter()
        for _ in range(_CALLS):
            call()
        return (time.perf_counter() - start) / _CALLS
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(_CALLS):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / _CALLS


def _slowest(value: float, device: torch.device) -> float:
    """Return the maximum over all ranks."""
    tensor = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor.item()


def _mesh(process: Process) -> DeviceMesh:
    """Return the mesh of machines and their GPUs.

    Raises:
        ParallelError: the machines have different numbers of ranks, or their ranks are not numbered in order.
    """
    size = process.local_world_size
    if process.world_size % size or process.rank % size != process.local_rank:
        raise ParallelError(
            f"rank {process.rank} of {process.world_size} is local rank {process.local_rank} of {size}, but an estimate "
            "counts machines with as many GPUs each, in order: start as many ranks on each machine, with torchrun"
        )
    shape = process.world_size // size, size
    return init_device_mesh(process.device.type, shape, mesh_dim_names=("machine", "gpu"))


def _products(
    device: torch.device, shape: tuple[int, int, int], dtype: torch.dtype
) -> list[Callable[[], torch.Tensor]]:
    """Return the products of a linear layer: of its forward, and for the gradients of its input and of its weight."""
    tokens, inputs, outputs = shape
    # Random values: a GPU multiplies zeros with less power, and so at a higher clock.
    x, weight = _random(device, tokens, inputs, dtype=dtype), _random(device, outputs, inputs, dtype=dtype)
    gradient = _random(device, tokens, outputs, dtype=dtype)
    return [lambda: x @ weight.t(), lambda: gradient @ weight, lambda: gradient.t() @ x]


def _float8_product(
    device: torch.device, shape: tuple[int, int, int], dtype: torch.dtype
) -> Callable[[], torch.Tensor]:
    """Return the product of a linear layer's forward, with one scale a tensor."""
    tokens, inputs, outputs = shape
    x, weight = (_random(device, size, inputs).to(dtype) for size in (tokens, outputs))
    one = torch.ones((), device=device)
    return lambda: scaled_mm(
        x, weight.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
    )


def _attention(device: torch.device, shape: tuple[int, int, int, int]) -> Callable[[], object]:
    q, k, v = (_random(device, *shape).requires_grad_() for _ in range(3))
    gradient = _random(device, *shape)

    def call() -> object:
        result = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return torch.autograd.grad(result, (q, k, v), gradient)

    return call


def _collectives(device: torch.device, size: int, group: Group) -> list[Callable[[], object]]:
    """Return an all-gather and a reduce-scatter of a full tensor of about `size` bytes, in bfloat16."""
    ranks = group[1]
    shard = _random(device, size // 2 // ranks)
    full = _random(device, ranks * shard.numel())
    return [lambda: all_gather(shard, 0, full.numel(), group), lambda: reduce_scatter(full, 0, group)]


def _host_time(device: torch.device, sizes: MeasureSizes) -> tuple[int, float]:
    """Return the number of operators of tiny layers, and the seconds in which the host issues them."""
    layers = (
        nn.Sequential(nn.Linear(16, 16, bias=False), nn.SiLU(), nn.LayerNorm(16)) for _ in range(sizes.layers)
    )
    model = nn.Sequential(*layers).to(device)
    x, parameters = torch.randn(16, 16, device=device), list(model.parameters())

    def call() -> None:
        torch.autograd.grad(model(x).sum(), parameters)

    timings = []
    with _Works() as recorded:
        call()
    for _ in range(_WARM_UP + sizes.repetitions):
        begin = time.perf_counter()
        call()
        timings.append(time.perf_counter() - begin)
        # Empty the GPU's queue, so that the host never waits because the queue is full.
        if device.type != "cpu":
            torch.cuda.synchronize(device)
    return len(recorded.works), _slowest(statistics.median(timings[_WARM_UP:]), device)


def _random(device: torch.device, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, device=device)


def _shapes(shapes: Iterable[Sequence[int]]) -> str:
    return _joined("x".join(map(str, shape)) for shape in shapes)


def _joined(texts: Iterable[str]) -> str:
    return ", ".join(texts)
