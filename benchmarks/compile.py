"""A training step eager, compiled, in float8, and both: tokens/s, peak memory, MFU, and what compiling costs.

    python -m benchmarks.compile [--models gla qwen3] [--variants eager compile] [--tp 2] [--rounds 10]

On a GPU gla-340M, transformer-340M and qwen3-0.6B, bfloat16; without one the debug flavors on the CPU, float32, where
float8 is emulated: then it shows what that costs, not what float8 gains. How it is measured: benchmarks/variants.py.
"""

from benchmarks.variants import Variant, run

VARIANTS = {
    "eager": Variant(False, None),
    "compile": Variant(True, None),
    "float8": Variant(False, "tensorwise"),
    "float8+compile": Variant(True, "tensorwise"),
}

if __name__ == "__main__":
    run(__doc__.partition("\n")[0], VARIANTS)
