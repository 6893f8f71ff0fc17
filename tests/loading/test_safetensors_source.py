import os
import sys

import pytest

from holdfast.errors import ModelFormatError
from holdfast.loading.safetensors_file import SafetensorsFile
from holdfast.loading.safetensors_source import SafetensorsSource
from loading.safetensors_bytes import write


def source_of(tmp_path, files, renames=()):
    return SafetensorsSource(
        [SafetensorsFile(write(tmp_path / name, tensors)) for name, tensors in files.items()], renames
    )


def test_entries_are_in_the_order_of_files_and_data(tmp_path):
    source = source_of(
        tmp_path, {"2.safetensors": {"z": ("F32", [2]), "a": ("F16", [3, 1])}, "1.safetensors": {"m": ("BF16", [1])}}
    )
    assert list(source.entries) == ["z", "a", "m"]
    entry = source.entries["a"]
    assert (entry.dtype, entry.shape, entry.file, entry.num_bytes) == ("float16", (3, 1), "2.safetensors", 6)
    source.close()
    source.close()


def test_types_that_torch_does_not_read_keep_their_name_for_messages(tmp_path):
    source = source_of(tmp_path, {"m.safetensors": {"a": ("F8_E4M3", [4])}})
    assert source.entries["a"].dtype == "F8_E4M3"
    source.close()


def test_buffers_of_older_checkpoints_may_stay_unused(tmp_path):
    names = ["model.layers.0.self_attn.rotary_emb.inv_freq", "model.norm.weight"]
    source = source_of(tmp_path, {"m.safetensors": {name: ("F32", [4]) for name in names}})
    assert source.ignorable == {names[0]}
    source.close()


def test_prefixes_are_renamed_and_a_clash_is_a_duplicate(tmp_path):
    tensors = {"decoder.a": ("F32", [1]), "lm_head.weight": ("F32", [1])}
    source = source_of(tmp_path, {"m.safetensors": tensors}, [("decoder.", "model.decoder.")])
    assert list(source.entries) == ["model.decoder.a", "lm_head.weight"]
    source.close()
    with pytest.raises(
        ModelFormatError, match=r"'model\.decoder\.a' is in 2\.safetensors; it is in 1\.safetensors too"
    ):
        source_of(
            tmp_path,
            {"1.safetensors": {"decoder.a": ("F32", [1])}, "2.safetensors": {"model.decoder.a": ("F32", [1])}},
            [("decoder.", "model.decoder.")],
        )


def test_rows_are_those_that_the_safetensors_package_reads(tmp_path):
    import torch
    from safetensors.torch import load_file

    tensors = {
        "odd": ("U8", [3]),  # puts what follows at an odd address
        "f64": ("F64", [5, 2]),
        "f32": ("F32", [7, 3]),
        "f16": ("F16", [9]),
        "bf16": ("BF16", [4, 2, 3]),
    }
    source = source_of(tmp_path, {"m.safetensors": tensors})
    expected = load_file(tmp_path / "m.safetensors")
    for name, tensor in expected.items():
        num_rows = tensor.shape[0]
        for start in range(num_rows):
            for end in range(start + 1, num_rows + 1):
                rows = source.read_rows(name, start, end)
                assert rows.dtype == tensor.dtype
                assert rows.shape == tensor[start:end].shape
                as_bytes = rows.contiguous().view(torch.uint8)
                assert torch.equal(as_bytes, tensor[start:end].contiguous().view(torch.uint8))
    source.close()


def test_one_buffer_serves_all_reads(tmp_path):
    source = source_of(tmp_path, {"m.safetensors": {"a": ("F32", [8]), "b": ("F32", [4])}})
    first = source.read_rows("a", 0, 8).data_ptr()
    assert source.read_rows("b", 0, 4).data_ptr() == first
    assert source.read_rows("a", 4, 8).data_ptr() == first
    source.close()


@pytest.mark.skipif(sys.platform != "linux", reason="descriptors are counted in /proc")
def test_one_file_is_open_at_a_time(tmp_path):
    files = {f"{index:03}.safetensors": {f"t{index}": ("F32", [2])} for index in range(50)}
    source = source_of(tmp_path, files)
    before = len(os.listdir("/proc/self/fd"))
    for index in range(50):
        source.read_rows(f"t{index}", 0, 2)
        assert len(os.listdir("/proc/self/fd")) <= before + 1
    source.close()
    assert len(os.listdir("/proc/self/fd")) == before
