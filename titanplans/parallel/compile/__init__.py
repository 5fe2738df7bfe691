"""torch.compile: the blocks of a model, the loss and the optimizer's step.

`components` compiles them; `limits` refuses what torch would run eagerly without an error; `graph_breaks` ends graphs at
FLA's kernels and where tokens go to other ranks; `async_tp` switches async tensor parallelism on and checks it.
"""

from titanplans.parallel.compile.components import (
    apply_compile,
    compile_loss,
    compile_optimizer,
    compile_options,
    one_graph_a_block,
)

__all__ = [
    "apply_compile",
    "compile_loss",
    "compile_optimizer",
    "compile_options",
    "one_graph_a_block",
]
