"""A compiled training step by each recipe of float8, and without: tokens/s, peak memory, and the loss.

    python -m benchmarks.float8 [--models gla qwen3] [--variants plain rowwise] [--tp 2] [--rounds 10]

On a GPU gla-340M, transformer-340M and qwen3-0.6B, against bfloat16; without one the debug flavors on the CPU, against
float32, where float8 is emulated: then it shows what the casts cost, not what float8 gains. How it is measured:
benchmarks/variants.py.
"""

from benchmarks.variants import Variant, run

VARIANTS = {
    "plain": Variant(True, None),
    "tensorwise": Variant(True, "tensorwise"),
    "rowwise": Variant(True, "rowwise"),
    "rowwise_with_gw_hp": Variant(True, "rowwise_with_gw_hp"),
}

if __name__ == "__main__":
    run(__doc__.partition("\n")[0], VARIANTS)
