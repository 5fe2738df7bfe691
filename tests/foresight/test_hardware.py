"""GPUs of titanplans and of a user's file."""

import pytest

from titanplans.errors import ConfigError
from titanplans.foresight.hardware import find_gpu, gpu_of_device

TABLE = {
    "memory_gib": 24,
    "outside_gib": 1.5,
    "gpus_per_node": 4,
    "processors": 100,
    "shared_memory": 100_000,
    "bfloat16_tflops": 100,
    "float8_tflops": 200,
    "float32_tflops": 10,
    "memory_gb_s": 1000,
    "link_gb_s": 100,
    "network_gb_s": 10,
    "product_efficiency": 0.7,
    "attention_efficiency": 0.3,
    "host_us": 5,
}


def write(folder, **changes):
    lines = [f"{key} = {value}" for key, value in (TABLE | changes).items() if value is not None]
    (folder / "own.toml").write_text("\n".join(["other = 1", "[mine]", *lines]))
    return folder / "own.toml"


@pytest.mark.parametrize("name", ["H100", "H200", "A100", "A100-40GB", "B200", "MI300X"])
def test_gpus_of_titanplans(name):
    gpu = find_gpu(name)
    assert 35 * 2**30 < gpu.usable < gpu.memory_gib * 2**30


def test_a_gpu_of_a_users_file(tmp_path):
    assert find_gpu("mine", write(tmp_path)).usable == 22.5 * 2**30
    assert find_gpu("H100", write(tmp_path)) == find_gpu("H100")


def test_a_gpu_that_is_like_another(tmp_path):
    file = tmp_path / "own.toml"
    file.write_text('[cluster]\nlike = "H100"\nnetwork_gb_s = 100')
    gpu, like = find_gpu("cluster", file), find_gpu("H100")
    assert (gpu.network_gb_s, gpu.memory_gb_s, gpu.torch_names) == (100, like.memory_gb_s, ())


@pytest.mark.parametrize("like", ["1", "[]", '"other"', '"mine"', '"second"'])
def test_no_gpu_to_be_like(tmp_path, like):
    file = tmp_path / "own.toml"
    file.write_text(f'other = 1\n[second]\nlike = "H100"\n[mine]\nlike = {like}')
    with pytest.raises(ConfigError, match=r"\[mine\]: like = .*: no such GPU"):
        find_gpu("mine", file)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"memory_gib": '"24"'}, r"own.toml, \[mine\]: memory_gib = "),
        ({"memory_gb": 24}, "memory_gb = 24: no such option; did you mean memory_gib"),
        ({"processors": None}, r"own.toml, \[mine\]: processors is missing"),
        ({"like": '"H1000"'}, r"own.toml, \[mine\]: like = \"H1000\": no such GPU; did you mean H100"),
    ],
)
def test_what_is_refused(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        find_gpu("mine", write(tmp_path, **changes))


def test_a_value_that_is_no_table(tmp_path):
    with pytest.raises(ConfigError, match=r"\[other\]: 1 is not a table"):
        find_gpu("other", write(tmp_path))


@pytest.mark.parametrize(
    ("device_name", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA B200", "B200"),
        ("AMD Instinct MI300X", "MI300X"),
    ],
)
def test_the_gpu_of_a_device_has_its_own_memory(device_name, name):
    gpu = gpu_of_device(device_name, 70 * 2**30)
    assert gpu == find_gpu(name).replace(memory_gib=70.0)


@pytest.mark.parametrize(
    "device_name",
    [
        "NVIDIA H100 PCIe",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA H200 NVL",
        "NVIDIA L40S",
        "Tesla V100-SXM2-16GB",
    ],
)
def test_a_device_that_is_none_of_these_gpus(device_name):
    with pytest.raises(ConfigError, match=f'"{device_name}": no GPU of titanplans.*--hardware FILE.toml'):
        gpu_of_device(device_name, 2**30)
