"""Compare `titanplans estimate` with published runs, and fit the efficiencies of products and attention of hardware.toml.

python benchmarks/estimate.py > docs/published_runs.md     # 9 minutes on two cores
python benchmarks/estimate.py --compiled                   # only the rows of compiled runs

The runs and their sources are in published_runs.tsv. The efficiencies are fitted on every second run of LLM Foundry, and
judged on the others.
"""

import argparse
import csv
import statistics
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from itertools import chain, product
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from titanplans.quiet import silence

RUNS = Path(__file__).with_name("published_runs.tsv")
GPUS = {"h100_80gb": "H100", "a100_80gb": "A100", "a100_40gb": "A100-40GB", "A100-80GB": "A100"}
GPUS |= {"H100-96GB-500W-2.4TB/s": "H100", "H100-96GB-500W": "H100", "H200": "H200"}
CHANGED = {"H100-96GB-500W-2.4TB/s": {"memory_gb_s": 2400.0, "memory_gib": 94.0}}
"""Values of a published GPU that differ from hardware.toml, according to the source."""
FITTED_WITH = "mosaicml/llm-foundry"
MPT = {"125m": (768, 12, 12), "350m": (1024, 16, 24), "760m": (1536, 12, 24), "1b": (2048, 16, 24)}
MPT |= {"3b": (2560, 20, 32), "7b": (4096, 32, 32), "13b": (5120, 40, 40), "30b": (7168, 56, 48)}
MPT |= {"70b": (8192, 64, 80)}
"""Hidden size, heads and blocks."""
RECOMPUTATION = {"no": "none", "full": "full", "selective op": "selective", "selective layer": "selective"}
JOB = """
[model]
name = "llama"
[training]
local_batch_size = {batch}
seq_len = {seq_len}
gradient_accumulation_steps = {batches}
dtype = "{dtype}"
[optimizer]
implementation = "{optimizer}"
[loss]
fused = false
[activation_checkpoint]
mode = "{recomputation}"
selective_ac_option = "{option}"
[compile]
enable = {compile}
components = {components}
[parallelism]
tensor_parallel_degree = {tp}
fsdp_reshard_after_forward = "{reshard}"
"""
FLOAT8 = """
[quantize.linear.float8]
recipe_name = "tensorwise"
filter_fqns = ["lm_head"]
enable_fsdp_float8_all_gather = {gather}
precompute_float8_dynamic_scale_for_fsdp = {gather}
"""


class Result(NamedTuple):
    """A published run and its forecast."""

    run: dict[str, str]
    tokens_per_second: float
    seconds: float
    parts: dict[str, float]
    reserved: int
    expandable: int

    @property
    def error(self) -> float:
        """The forecast's relative error of tokens per second."""
        return self.tokens_per_second / float(self.run["tokens_s_gpu"]) - 1


def is_comparable(run: dict[str, str]) -> bool:
    """Whether titanplans can run a job like this run. LLM Foundry's float8 is not torchao's, and titanplans refuses compiled
    blocks that are split by tensor parallelism and recompute attention."""
    if run["source"].startswith(FITTED_WITH) and run["float8"] != "0":
        return False
    return not (is_compiled(run) and int(run["tp"]) > 1 and run["ac"] == "full")


def is_compiled(run: dict[str, str]) -> bool:
    return run["compile"] == "1"


def result_of(run: dict[str, str]) -> Result:
    from titanplans import kernels
    from titanplans.config import load_job
    from titanplans.foresight.forecast import forecast_of

    kernels.install("cpu")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "job.toml")
        file.write_text(
            JOB.format(
                batch=run["local_batch"],
                seq_len=run["seq"],
                batches=run["accum"],
                dtype="bfloat16" if run["precision"] == "bf16 PURE" else "float32",
                recomputation=RECOMPUTATION[run["ac"]],
                option="2" if run["ac"] == "selective layer" else "op",
                tp=run["tp"],
                optimizer="fused" if "fused AdamW" in run["note"] else "foreach",
                compile=str(is_compiled(run)).lower(),
                components='["model", "loss"]' if "compiled loss" in run["note"] else '["model"]',
                reshard="never" if "SHARD_GRAD_OP" in run["note"] else "always",
            )
            + (
                ""
                if run["float8"] == "0"
                else FLOAT8.format(gather=str("all-gather" in run["float8"]).lower())
            )
        )
        job = load_job([str(file)])
    result = forecast_of(job, config_of(run), int(run["gpus"]), gpu_of(run["gpu"]))
    (rank,) = result.ranks
    reserved, expandable = rank.memory.standard.reserved, rank.memory.expandable.reserved
    return Result(run, result.tokens_per_second, result.seconds, rank.time.parts, reserved, expandable)


@cache
def gpu_of(name: str) -> Any:
    from titanplans.foresight.hardware import find_gpu

    return find_gpu(GPUS[name]).replace(**CHANGED.get(name, {}))


def config_of(run: dict[str, str]) -> Any:
    from transformers import GPT2Config

    from titanplans.modeling import load_config

    family, _, size = run["model"].partition("-")
    if family != "mpt":
        return load_config("llama", f"3.1-{size}")
    hidden, heads, blocks = MPT[size]
    # A GPT-2, which has the same blocks, stands in for MPT: transformers' MPT computes attention in plain operators.
    sizes = {"n_embd": hidden, "n_head": heads, "n_layer": blocks, "n_positions": int(run["seq"])}
    no_dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return GPT2Config(vocab_size=50368, activation_function="gelu", use_cache=False, **sizes, **no_dropout)


class Efficiencies(NamedTuple):
    """Fractions of the GPU's peak that matrix products and attention reach."""

    products: float
    attention: float


def refit(result: Result, to: Efficiencies) -> float:
    """Return the relative error of a forecast with other efficiencies than hardware.toml's."""
    from titanplans.foresight.time import ATTENTION, PRODUCTS

    gpu, parts = gpu_of(result.run["gpu"]), result.parts
    seconds = result.seconds
    seconds += parts[PRODUCTS] * (gpu.product_efficiency / to.products - 1)
    seconds += parts[ATTENTION] * (gpu.attention_efficiency / to.attention - 1)
    return (1 + result.error) * result.seconds / seconds - 1


def fit(results: Sequence[Result]) -> Efficiencies:
    """Return the efficiencies with the smallest mean of absolute errors."""
    center, step = Efficiencies(0.7, 0.3), 0.1
    while step > 0.004:
        near = [
            Efficiencies(center.products + a * step, center.attention + b * step)
            for a, b in product((-1, 0, 1), repeat=2)
        ]
        near = [each for each in near if min(each) > 0.05 and max(each) < 1]
        best = min(near, key=lambda each: sum(abs(refit(result, each)) for result in results))
        if best == center:
            step /= 2
        center = best
    return center


def summary(errors: Iterable[float]) -> str:
    absolute = [abs(error) for error in errors]
    return f"{len(absolute)} | {statistics.median(absolute):.1%} | {max(absolute):.1%}"


def title(run: dict[str, str]) -> str:
    settings = [run["precision"]]
    settings += ["compiled"] if is_compiled(run) else []
    settings += (
        [] if run["float8"] == "0" else ["float8" + (" gathers" if "all-gather" in run["float8"] else "")]
    )
    return (
        f"{run['model']} | {run['gpus']} {run['gpu']} | {run['local_batch']} x {int(run['seq']):,} | {run['accum']} | "
        f"{run['ac']} | {', '.join(settings)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--compiled", action="store_true", help="print only the rows of compiled runs")
    only_compiled = parser.parse_args().compiled
    with RUNS.open() as file:
        runs = [run for run in csv.DictReader(file, delimiter="\t")]
    comparable = [run for run in runs if is_comparable(run) and (is_compiled(run) or not only_compiled)]
    with ProcessPoolExecutor(2, get_context("spawn"), silence) as pool:
        results = list(pool.map(result_of, comparable))
    if not only_compiled:
        print_summary(runs, results)
    print_rows(results)


def print_summary(runs: Sequence[dict[str, str]], results: Sequence[Result]) -> None:
    comparable = [each.run for each in results]
    print(HEAD.format(runs=len(runs), comparable=len(comparable)))
    print("\n## Time, in summary\n\n| | runs | median error | worst |\n|---|--:|--:|--:|")
    fitted = [each for each in results if each.run["source"].startswith(FITTED_WITH)]
    rest = [each for each in results if not each.run["source"].startswith(FITTED_WITH)]
    lines = []
    for kind in ("H100", "A100"):
        of_kind = [each for each in fitted if GPUS[each.run["gpu"]].startswith(kind)]
        odd, even = of_kind[::2], of_kind[1::2]
        print(
            f"| {kind}: runs of LLM Foundry that the efficiencies were not fitted on | {summary(e.error for e in even)} |"
        )
        sizes = Counter(each.run["model"] for each in of_kind)
        left_out = {
            size: [
                refit(each, fit([e for e in of_kind if e.run["model"] != size]))
                for each in of_kind
                if each.run["model"] == size
            ]
            for size in sizes
        }
        lines += [f"| {kind} | {size} | {summary(errors)} |" for size, errors in left_out.items()]
        lines.append(f"| {kind} | all of these | {summary(chain(*left_out.values()))} |")
        best = fit(odd)
        lines.append(
            f"| {kind} | fitted on every second run: products {best.products:.3f}, attention {best.attention:.3f} | | | |"
        )
    for compiled in (False, True):
        errors = [each.error for each in rest if is_compiled(each.run) == compiled]
        print(f"| torchtitan's runs {'with' if compiled else 'without'} compile | {summary(errors)} |")
    print(
        "\nFor each size of model the efficiencies are fitted on all other sizes, and then judged on this size:\n"
    )
    print("| | size | runs | median error | worst |\n|---|---|--:|--:|--:|", *lines, sep="\n")


def print_rows(results: Sequence[Result]) -> None:
    print(f"\n## Memory, row by row\n\n{COLUMNS} published GiB | forecast | error | expandable segments |")
    print(f"{RULE}--:|--:|--:|--:|")
    for each in results:
        if each.run["mem_gib"]:
            published, reserved = float(each.run["mem_gib"]), each.reserved / 2**30
            print(
                f"| {title(each.run)} | {published} | {reserved:.1f} | {reserved / published - 1:+.1%} | "
                f"{each.expandable / 2**30:.1f} |"
            )
    print(f"\n## Time, row by row\n\n{COLUMNS} published tokens/s | forecast | error |\n{RULE}--:|--:|--:|")
    for each in results:
        published, forecast = float(each.run["tokens_s_gpu"]), each.tokens_per_second
        print(f"| {title(each.run)} | {published:,.0f} | {forecast:,.0f} | {each.error:+.1%} |")


COLUMNS = "| model | GPUs | batch | batches | recomputation | precision |"
RULE = "|---|---|---|--:|---|---|"
HEAD = """# Forecasts and published runs

`benchmarks/estimate.py` wrote this page. Of {runs} published runs (benchmarks/published_runs.tsv, with their sources), it
compares {comparable}: the runs of torchtitan, and the runs of LLM Foundry without float8. (LLM Foundry computes float8 with
another library.) Two runs of torchtitan are left out, since titanplans refuses such jobs: their blocks are compiled, split
by tensor parallelism, and recompute attention.

What had to be assumed:

- LLM Foundry: its MPT is computed as a GPT-2 of the same sizes with its vocabulary of 50,368, and FSDP1 as FSDP2.
  `amp_bf16` is computed as float32 shards with parameters in bfloat16, `PURE` as bfloat16 alone. AdamW and clipping are
  titanplans'.
- The GPUs have the peaks and links of [hardware.toml](../titanplans/foresight/hardware.toml). For torchtitan's H100, the
  source states a memory bandwidth of 2.4 TB/s, which is used. Its power limit of 500 W is not modelled.
- The efficiencies of matrix products and of attention in hardware.toml were fitted here, one pair for H100 and one for
  A100. The bandwidth of memory is 85 % of the data sheet's; it can't be fitted separately on these runs.
- Two rows contradict their neighbours: MPT 1B on 32 A100-40GB (15,555 tokens/s; 19,085 on 16 and 19,001 on 64), and MPT 760M
  on A100-80GB, which is slower with sequences of 512 than of 2,048 (all other sizes are faster with 512). They count like
  all other rows.
- torchtitan's model is computed as transformers' model, which rotates queries and keys in another way. Its last Linear is
  not in float8, and its loss is compiled only where the source says so.
- Whether torchtitan's runs had expandable segments is not published.

No runs of linear attention, mixtures, context parallelism or pipelines are published."""

if __name__ == "__main__":
    silence()
    main()
