"""Compiled blocks on sequences of several documents have the logits of eager mode, for any count of documents."""

import copy

import pytest
import torch

from tests import zoo
from titanplans import kernels
from titanplans.parallel import Degrees, FSDP2Config, Mesh, parallelize, process_group

ROWS = ([0, 7, 20, 40], [0, 33, 40], [0, 3, 9, 15, 40], [0, 40])


@pytest.mark.parametrize("name", ["gla", "gated_deltanet", "transformer", "rwkv7"])
def test_any_count_of_documents(name):
    kernels.install("cpu")
    eager = zoo.build(name, dtype=torch.float32, options=False)
    model, ids = copy.deepcopy(eager), torch.randint(90, (1, 40), generator=torch.Generator().manual_seed(0))
    compiled = {"enable": True, "backend": "aot_eager", "components": ["model"]}
    torch._dynamo.reset()
    with process_group("cpu"):
        mesh = Mesh(Degrees(), "cpu")
        config = FSDP2Config(mixed_precision_param=None, compile=compiled)
        parallelize(model, parallel_dims=mesh, config=config)
        for bounds in ROWS:
            batch = {
                "input_ids": ids,
                "cu_seqlens": torch.tensor(bounds, dtype=torch.int32),
                "use_cache": False,
            }
            logits = model(**batch).logits
            torch.testing.assert_close(logits, eager(**batch).logits)
            logits.sum().backward()
