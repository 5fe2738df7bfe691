"""python -m benchmarks.cpu_kernels [--threads 1] [--repeats 9]

Compare two CPU implementations of gated linear attention: chunks, as in `titanplans.kernels`, and a loop over tokens, as in
FLA's naive recurrence. Prints milliseconds per forward and backward in float32, their ratio, and the memory of tensors saved
for the backward. Runs of the two are interleaved. Takes about a minute.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from fla.ops.gla.naive import naive_recurrent_gla

from titanplans.kernels.recurrent import chunks
from titanplans.training.launch.exit_status import finish

# Batch size, tokens, heads, key size and value size per head. The last shape is the shape in a layer of the 340M flavor.
SHAPES = [(2, 64, 4, 16, 32), (2, 512, 4, 64, 128), (1, 2048, 4, 64, 128), (1, 512, 4, 128, 256)]
CHUNK_SIZES = (16, 32, 64, 128)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=1, help="threads of torch's operators (default: 1)")
    parser.add_argument("--repeats", type=int, default=9, help="number of timed steps (default: 9)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    print(f"torch {torch.__version__}, {options.threads} thread(s), median of {options.repeats} steps\n")
    print(
        "|   B |     T |   H |   K |   V |  naive ms | chunked ms | ratio | naive saves MB | chunked saves MB |"
    )
    print(
        "|----:|------:|----:|----:|----:|----------:|-----------:|------:|---------------:|-----------------:|"
    )
    for shape in SHAPES:
        naive, chunked = times([naive_step(shape), chunked_step(shape)], options.repeats)
        saved = [saved_megabytes(step) for step in (naive_step(shape), chunked_step(shape))]
        sizes = " | ".join(f"{size:{width}d}" for size, width in zip(shape, (3, 5, 3, 3, 3), strict=True))
        columns = (
            f"{naive:9.1f} | {chunked:10.2f} | {naive / chunked:5.1f} | {saved[0]:14.1f} | {saved[1]:16.1f}"
        )
        print(f"| {sizes} | {columns} |")

    print("\n| chunk size | " + " | ".join(f"{size:4d}" for size in CHUNK_SIZES) + " |")
    print("|" + "-" * 12 + "|" + "|".join(["-----:"] * len(CHUNK_SIZES)) + "|")
    step = chunked_step(SHAPES[1])
    default, columns = chunks.CHUNK_SIZE, []
    for chunks.CHUNK_SIZE in CHUNK_SIZES:
        columns.append(times([step], options.repeats)[0])
    chunks.CHUNK_SIZE = default
    print(
        "| ms         | " + " | ".join(f"{x:4.1f}" for x in columns) + f" |   (B, T, H, K, V = {SHAPES[1]})"
    )


def naive_step(shape: tuple[int, ...]) -> Callable[[], None]:
    return step_of(lambda q, k, v, g: naive_recurrent_gla(q, k, v, g)[0], shape)


def chunked_step(shape: tuple[int, ...]) -> Callable[[], None]:
    scale = shape[3] ** -0.5
    return step_of(lambda q, k, v, g: chunks.linear_attention(q * scale, k, v, g)[0], shape)


def step_of(function: Callable[..., torch.Tensor], shape: tuple[int, ...]) -> Callable[[], None]:
    """Return a function that runs a forward and a backward with gradients for q, k, v and g."""
    torch.manual_seed(0)
    batch, seq_len, heads, key, value = shape
    q, k, g = torch.randn(3, batch, seq_len, heads, key).unbind()
    v, do = torch.randn(2, batch, seq_len, heads, value).unbind()
    leaves = [x.requires_grad_() for x in (q, k, v, F.logsigmoid(g) / 16)]
    return lambda: torch.autograd.grad(function(*leaves), leaves, do) and None


def times(steps: list[Callable[[], None]], repeats: int) -> list[float]:
    """Return the median milliseconds of each step. The steps are interleaved, so that other load slows all of them."""
    for step in steps:
        step()
    by_step: list[list[float]] = [[] for _ in steps]
    for _ in range(repeats):
        for step, series in zip(steps, by_step, strict=True):
            begin = time.perf_counter()
            step()
            series.append((time.perf_counter() - begin) * 1e3)
    return [statistics.median(series) for series in by_step]


def saved_megabytes(step: Callable[[], None]) -> float:
    """Return the memory that autograd saves between the forward and the backward, counting each storage once."""
    storages: dict[int, int] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        step()
    return sum(storages.values()) / 2**20


if __name__ == "__main__":
    main()
    finish(0)
