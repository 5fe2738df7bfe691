"""A checkpoint has full weights, however many ranks share heads and however uneven the shards are."""

import tempfile
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from tests.support import process_groups
from tests.zoo import odd_qwen3

MESHES = {"tp 4": (4, 1), "tp 2 x fsdp 2": (2, 1), "tp 2 x replicate 2": (2, 2), "fsdp 4": (1, 1)}


def split(tp, replicate):
    from tests.support.torchtitan_meshes import parallel_dims
    from titanplans.parallel import parallelize

    model = odd_qwen3()  # 8 heads, 2 key/value heads, vocabulary of 97, MLPs of 45
    parallelize(
        model,
        parallel_dims=parallel_dims(replicate, -1, 1, tp, 1, 1, 4),
        training=SimpleNamespace(
            mixed_precision_param="float32", mixed_precision_reduce="float32", enable_cpu_offload=False
        ),
        parallelism=SimpleNamespace(
            enable_sequence_parallel=True, fsdp_reshard_after_forward="default", enable_fsdp_symm_mem=False
        ),
        compile_config=SimpleNamespace(enable=False, components=[], enable_async_tensor_parallel=False),
        ac_config=None,
        dump_folder="",
    )
    return model


def all_pairs(rank):
    folders = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folders)
    models = {name: split(*mesh) for name, mesh in MESHES.items()}
    shapes, wrong = {}, []
    full = {key: param.detach() for key, param in odd_qwen3().named_parameters()}
    for name, model in models.items():
        path = f"{folders[0]}/{name}"
        dcp.save(get_model_state_dict(model), checkpoint_id=path)
        metadata = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
        shapes[name] = {key: tuple(tensor.size) for key, tensor in metadata.items()}
        for target_name, target in models.items():
            with torch.no_grad():
                for param in target.parameters():
                    param.to_local().zero_()
            state = get_model_state_dict(target)
            dcp.load(state, checkpoint_id=path)
            set_model_state_dict(target, state)
            wrong += [
                (name, target_name, key)
                for key, param in target.named_parameters()
                if not torch.equal(param.full_tensor(), full[key])
            ]
    return shapes, wrong


result = process_groups.module_fixture(all_pairs, 4)


def test_full_weights_are_saved(result):
    expected = {key: tuple(value.shape) for key, value in odd_qwen3().state_dict().items()}
    for name, shapes in result[0].items():
        assert shapes == expected, name


def test_every_split_loads_the_checkpoint_of_every_other(result):
    assert not result[1]
