"""Compare text loaders of titanplans and torchtitan: tokens per second and memory, and the demand of a small job.

    python -m benchmarks.data [--tokens 10_000_000] [--rounds 3] [--seq-len 2048]

The corpus is Python's standard library in two .jsonl files, tokenised with titanplans' byte-level BPE. The variants are
interleaved, each in a new process of one thread without workers. "first batch" is the time until the first batch, with
files that were converted before. Memory is resident memory, after a tenth of the tokens and at the end. The demand is the
number of tokens per second that a job trains on: GLA in its debug size, in one process on this machine.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import multiprocessing

from titanplans.training.launch.exit_status import finish

BATCH = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=10_000_000, help="tokens per variant and round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seq-len", type=int, default=2048)
    args = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    results: dict[str, list[dict[str, float]]] = {name: [] for name in VARIANTS}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["HF_DATASETS_CACHE"] = f"{folder}/cache"
        write_corpus(Path(folder))
        for name in VARIANTS:
            measure(name, folder, args.seq_len, BATCH * args.seq_len)  # converts the files
        for _ in range(args.rounds):
            for name in VARIANTS:
                results[name].append(measure(name, folder, args.seq_len, args.tokens))
        demand = measure_demand(folder)
    report(results, demand, args)


def write_corpus(folder: Path) -> None:
    """Write two files of fragments of the standard library: "code" of up to 64 KiB each, and "short" of about 1 KiB each."""
    from titanplans.training.data.corpus.local import TextFiles, stdlib_files, stdlib_root

    root = stdlib_root()
    for name, size in (("code", 64 * 1024), ("short", 1024)):
        texts = TextFiles(root, stdlib_files(root), "all", size)
        with (folder / f"{name}.jsonl").open("w") as file:
            file.writelines(json.dumps({"text": texts.document(i)}) + "\n" for i in range(len(texts)))


def ours(folder: str, *names: str, **data: Any) -> Any:
    """Return a function that builds titanplans' loader of the files `names`."""
    from titanplans.config.sections.data import Data
    from titanplans.training.data.loader import TextDataLoader

    sources = [
        {"name": name, "dataset_path": f"{folder}/{name}.jsonl", "dataset_split": "all"} for name in names
    ]
    return partial(
        TextDataLoader, TextDataLoader.Config(data=Data(documents="apart", sources=sources, **data))
    )


def torchtitans(folder: str, *names: str) -> Any:
    """Return a function that builds torchtitan's loader of the same files."""
    from datasets import load_dataset
    from torchtitan.hf_datasets import DatasetConfig
    from torchtitan.hf_datasets.text_datasets import (
        DATASETS,
        HFDataSource,
        HuggingFaceTextDataLoader,
        InterleavedHuggingFaceTextDataLoader,
    )

    for name in names:
        DATASETS[name] = DatasetConfig(
            path=f"{folder}/{name}.jsonl",
            loader=lambda path: load_dataset("json", data_files=path, split="train"),
            sample_processor=lambda sample: sample["text"],
        )
    if len(names) == 1:
        return HuggingFaceTextDataLoader.Config(dataset=names[0]).build
    sources = [HFDataSource(dataset=name) for name in names]
    return InterleavedHuggingFaceTextDataLoader.Config(sources=sources).build


VARIANTS: dict[str, Callable[[str], Any]] = {
    "torchtitan": partial(torchtitans),
    "titanplans, cut": partial(ours),
    "titanplans, best fit": partial(ours, packing="best_fit"),
    "torchtitan, two sources": partial(torchtitans),
    "titanplans, two sources": partial(ours),
}


def measure(name: str, folder: str, seq_len: int, tokens: int) -> dict[str, float]:
    """Run `load` in a new process, and return its measurements."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe()
    process = context.Process(target=load, args=(name, folder, seq_len, tokens, sender))
    process.start()
    sender.close()
    measurements = receiver.recv()
    process.join()
    return measurements


def load(name: str, folder: str, seq_len: int, tokens: int, pipe: Any) -> None:
    """Load `tokens` tokens, and send the measurements through `pipe`."""
    from titanplans.quiet import silence

    silence()
    torch.set_num_threads(1)
    from torchtitan.components.tokenizer import HuggingFaceTokenizer

    from titanplans.training.data.vocabulary import default_tokenizer_path

    tokenizer = HuggingFaceTokenizer(HuggingFaceTokenizer.Config(), tokenizer_path=default_tokenizer_path())
    names = ("code", "short") if "two" in name else ("code",)
    begin = time.perf_counter()
    ranks = {"dp_rank": 0, "dp_world_size": 1}
    loader = VARIANTS[name](folder, *names)(
        tokenizer=tokenizer, seq_len=seq_len, local_batch_size=BATCH, **ranks
    )
    batches: Iterator[Any] = iter(loader)
    next(batches)
    first = time.perf_counter() - begin
    early, done, begin = 0.0, 0, time.perf_counter()
    while done < tokens:
        _, labels = next(batches)
        done += labels.numel()
        if done >= tokens / 10 and not early:
            early = resident()
    seconds = time.perf_counter() - begin
    pipe.send({"first": first, "rate": done / seconds, "early": early, "late": resident()})


def resident() -> float:
    """Return the resident memory of this process, in MB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def measure_demand(folder: str) -> float:
    """Return how many tokens per second a small job trains on with this machine."""
    job = Path(__file__).parents[1] / "configs" / "gla_debug.toml"
    options = [
        *(
            "--training.steps",
            "12",
            "--metrics.log_freq",
            "6",
            "--metrics.enable_jsonl",
            "--validation.no-enable",
        ),
        *("--parallelism.tensor_parallel_degree", "1", "--job.dump_folder", f"{folder}/job"),
    ]
    command = [sys.executable, "-m", "titanplans", "train", str(job), *options]
    subprocess.run(command, check=True, capture_output=True)
    (metrics,) = Path(folder).glob("job/**/metrics.jsonl")
    return json.loads(metrics.read_text().splitlines()[-1])["throughput/all_devices(tps)"]


def report(results: dict[str, list[dict[str, float]]], demand: float, args: argparse.Namespace) -> None:
    """Print the table."""
    print(
        f"{args.tokens:,} tokens in sequences of {args.seq_len}, medians of {args.rounds}; one process each\n"
    )
    print("| | first batch, s | tokens/s | ratio | resident, MB, after a tenth | at the end |")
    print("|---|---:|---:|---:|---:|---:|")
    rates = {name: statistics.median(r["rate"] for r in rounds) for name, rounds in results.items()}
    for name, rounds in results.items():
        medians = {key: statistics.median(r[key] for r in rounds) for key in ("first", "early", "late")}
        base = rates["torchtitan, two sources" if "two" in name else "torchtitan"]
        print(
            f"| {name} | {medians['first']:.1f} | {rates[name]:,.0f} | {rates[name] / base:.2f} | "
            f"{medians['early']:,.0f} | {medians['late']:,.0f} |"
        )
    print(f"\nGLA's debug size trains on {demand:,.0f} tokens/s in one process of this machine.")


if __name__ == "__main__":
    main()
    finish(0)
