"""GGUF models in several files: any part opens all of them, with the weights of the one file; wrong parts are refused."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from error_codes import raises_code
from for_each import for_each
from holdfast.errors import HoldfastError, ModelError
from holdfast.loading.declared import open_declared
from holdfast.loading.execution.execute import load_weights
from holdfast.loading.gguf.parts import model_name, read_parts
from holdfast.loading.model_files import open_gguf, open_model
from holdfast.loading.planning.plan import plan_load
from holdfast.loading.quantized.manifest import identify_source
from holdfast.memory.ledger import Ledger
from kernels.exactness import same_bits

gguf = pytest.importorskip("gguf")

HIDDEN, INNER, LAYERS, VOCAB = 64, 96, 2, 80
MATRIX = gguf.GGMLQuantizationType.Q8_0


def tensors(seed: int = 1) -> dict[str, np.ndarray]:
    """A tiny Qwen 2, tied."""
    rng = np.random.default_rng(seed)
    shapes = {"token_embd.weight": (VOCAB, HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        sizes = {"attn_norm": (HIDDEN,), "ffn_norm": (HIDDEN,), "attn_output": (HIDDEN, HIDDEN)}
        sizes |= {"attn_q": (HIDDEN, HIDDEN), "attn_k": (32, HIDDEN), "attn_v": (32, HIDDEN)}
        sizes |= {"ffn_gate": (INNER, HIDDEN), "ffn_up": (INNER, HIDDEN), "ffn_down": (HIDDEN, INNER)}
        shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in sizes.items()}
        shapes |= {f"blk.{layer}.attn_{name}.bias": (size,) for name, size in (("q", HIDDEN), ("k", 32), ("v", 32))}
    return {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


def write(path: Path, num_parts: int = 1, small_first_shard: bool = False, seed: int = 1) -> list[Path]:
    """The tiny model by the gguf package's own writer, in one file or in several."""
    numbers = tensors(seed)
    most = -(-len(numbers) // (num_parts - small_first_shard)) if num_parts > 1 else 0
    writer = gguf.GGUFWriter(path, "qwen2", split_max_tensors=most, small_first_shard=small_first_shard)
    writer.add_block_count(LAYERS)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_token_list([f"token{index}" for index in range(VOCAB)])
    for name, values in numbers.items():
        kind = MATRIX if values.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(path.parent.glob(f"{path.stem}*.gguf"))


def loaded(path: Path) -> dict[str, torch.Tensor]:
    opened = open_model(str(path), "auto")
    plan = plan_load(opened.parameters, opened.source, "float32")
    weights = load_weights(plan, opened.source, "cpu", Ledger(), lambda done, total: None).weights
    opened.source.close()
    return {name: weight for name, weight in weights.items() if isinstance(weight, torch.Tensor)}


@pytest.mark.parametrize(("num_parts", "small_first_shard"), [(2, False), (3, False), (3, True)])
def test_open_model_any_gguf_part_or_folder_opens_all_parts(tmp_path, num_parts, small_first_shard):
    whole, folder = tmp_path / "whole", tmp_path / "split"
    whole.mkdir()
    folder.mkdir()
    (single,) = write(whole / "tiny.gguf")
    parts = write(folder / "tiny.gguf", num_parts, small_first_shard)
    assert [path.name for path in parts] == [f"tiny-{n:05d}-of-{num_parts:05d}.gguf" for n in range(1, num_parts + 1)]
    expected = loaded(single)
    for path in (*parts, folder):
        opened = open_model(str(path), "auto")
        assert opened.path == parts[0]
        assert opened.gguf is not None
        assert [file.path for file in opened.gguf.files] == parts
        assert opened.gguf.disk_bytes == sum(part.stat().st_size for part in parts)
        assert opened.gguf.metadata["tokenizer.ggml.tokens"][5] == "token5"
        opened.source.close()
        declared = open_declared(str(path))
        assert (declared.name, declared.num_layers) == ("tiny", LAYERS)
    assert loaded(folder).keys() == expected.keys()
    assert all(same_bits(weight, expected[name]) for name, weight in loaded(parts[-1]).items())


def test_identify_source_of_gguf_covers_every_part(tmp_path):
    """A quantized cache that was made from other parts is not taken."""
    parts = write(tmp_path / "tiny.gguf", 3)
    then = identify_source(open_gguf(parts[1]))
    assert then is not None
    assert [file.name for file in then.files] == [part.name for part in parts]
    assert then.num_bytes == sum(part.stat().st_size for part in parts)
    data = bytearray(parts[2].read_bytes())
    data[-1] ^= 1
    parts[2].write_bytes(data)
    now = identify_source(open_gguf(parts[0]))
    assert now is not None
    assert parts[2].name in (now.change(then) or "")


def test_load_weights_gguf_part_changed_since_open_is_refused(tmp_path):
    parts = write(tmp_path / "tiny.gguf", 2)
    opened = open_gguf(parts[0])
    parts[1].write_bytes(parts[1].read_bytes() + b"\0")
    plan = plan_load(opened.parameters, opened.source, "float32")
    with raises_code("file.changed", ModelError):
        load_weights(plan, opened.source, "cpu", Ledger(), lambda done, total: None)
    opened.source.close()


def _drop(parts: list[Path]) -> None:
    parts[2].unlink()


def _swap(parts: list[Path]) -> None:
    kept = parts[1].read_bytes()
    shutil.copy(parts[2], parts[1])
    parts[2].write_bytes(kept)


def _duplicate(parts: list[Path]) -> None:
    shutil.copy(parts[1], parts[2])


def _foreign(parts: list[Path]) -> None:
    other = parts[0].parent / "other"
    other.mkdir()
    shutil.copy(write(other / "tiny.gguf", 2)[1], parts[2])


def _plain(parts: list[Path]) -> None:
    other = parts[0].parent / "plain"
    other.mkdir()
    shutil.copy(write(other / "tiny.gguf")[0], parts[1])


def _twice(parts: list[Path]) -> None:
    """A part whose number was made to fit holds the tensors of another one."""
    data = parts[1].read_bytes()
    place = data.index(b"split.no") + len(b"split.no") + 4
    assert data[place : place + 2] == b"\1\0"
    parts[2].write_bytes(data[:place] + b"\2\0" + data[place + 2 :])


def _renamed(parts: list[Path]) -> None:
    parts[0].rename(parts[0].parent / "first.gguf")
    parts[0] = parts[0].parent / "first.gguf"


WRONG = {
    "missing": (_drop, "gguf.missing_parts"),
    "misordered": (_swap, "gguf.wrong_part"),
    "duplicate": (_duplicate, "gguf.wrong_part"),
    "foreign": (_foreign, "gguf.wrong_part"),
    "plain": (_plain, "gguf.wrong_part"),
    "twice": (_twice, "gguf.wrong_part"),
    "renamed": (_renamed, "gguf.renamed_part"),
}


@for_each("case", WRONG)
def test_open_model_wrong_gguf_parts_are_refused_in_one_line(tmp_path, case):
    parts = write(tmp_path / "tiny.gguf", 3)
    spoil, code = WRONG[case]
    spoil(parts)
    with raises_code(code, HoldfastError) as caught:
        open_model(str(parts[0]), "auto")
    assert "\n" not in str(caught.value)
    assert "llama-gguf-split" not in str(caught.value)


@pytest.mark.parametrize("number", [1, 2])
def test_open_model_gguf_part_of_another_model_is_refused(tmp_path, number):
    """Another part of the same place that says another number of tensors."""
    parts = write(tmp_path / "tiny.gguf", 3)
    data = parts[number].read_bytes()
    place = data.index(b"split.tensors.count") + len(b"split.tensors.count") + 4
    parts[number].write_bytes(data[:place] + b"\x07\0\0\0" + data[place + 4 :])
    with raises_code("gguf.wrong_part", ModelError, file=parts[number].name):
        read_parts(parts[0])


def test_open_model_folder_with_two_gguf_models_is_refused(tmp_path):
    write(tmp_path / "one.gguf", 2)
    write(tmp_path / "two.gguf")
    (tmp_path / "mmproj-two.gguf").write_bytes(b"")
    with raises_code("gguf.several_models", ModelError):
        open_model(str(tmp_path), "auto")


def test_model_name_strips_folder_and_part_number():
    assert model_name(Path("a/Big-Q4_K_M-00002-of-00011.gguf")) == "Big-Q4_K_M"
    assert model_name(Path("Big-Q4_K_M.gguf")) == "Big-Q4_K_M"
