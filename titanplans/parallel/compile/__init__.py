"""torch.compile for the blocks of a model, the loss and the optimizer's step. Start at `components`.

`limits` raises errors where torch would silently run eagerly; `graph_breaks` places graph breaks at FLA's kernels and where
tokens are sent to other ranks; `async_tp` enables and checks async tensor parallelism.
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
