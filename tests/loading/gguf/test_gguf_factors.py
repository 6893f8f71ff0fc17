"""NVFP4's second tensor: a factor for a matrix or for each expert, applied to whatever rows are read."""

import numpy as np
import pytest
import torch

from error_codes import raises_code
from for_each import for_each
from holdfast.errors import ModelFormatError
from holdfast.loading.gguf import source as gguf_source
from holdfast.loading.gguf.file import read_gguf
from holdfast.loading.gguf.parts import read_parts
from holdfast.loading.gguf.source import GGUFSource
from holdfast.loading.sources.source import read_rows
from loading.block_files import Stored, expanded, plain, random_blocks, write_tensors

HEAD_DIM = 16
UP, UP_EXPERTS = "blk.0.ffn_up.weight", "blk.0.ffn_up_exps.weight"
UP_NAME, UP_EXPERTS_NAME = "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.experts.up_proj.weight"


def source_of(path, tensors: dict[str, Stored], head_dim: int | None = None) -> GGUFSource:
    write_tensors(path, tensors)
    return GGUFSource(read_gguf(path), head_dim)


def assert_rows(source: GGUFSource, name: str, whole: np.ndarray, *ranges: tuple[int, int], columns=None) -> None:
    table = torch.from_numpy(whole.reshape(-1, whole.shape[-1]))
    first, last = columns or (0, table.shape[1])
    for start, end in ranges:
        assert torch.equal(read_rows(source, name, start, end, columns), table[start:end, first:last]), (start, end)


@pytest.mark.parametrize("factor", [0.37, -2.0, 0.0, 1e-38])
def test_gguf_source_nvfp4_factor_multiplies_rows_and_columns(tmp_path, factor):
    tensors = {UP: random_blocks("NVFP4", (9, 192), 0), "blk.0.ffn_up.scale": plain(np.array([factor]))}
    source = source_of(tmp_path / "model.gguf", tensors)
    whole = expanded(tensors)[UP].raw
    assert_rows(source, UP_NAME, whole, (0, 9), (3, 5), (8, 9), (4, 4))
    for columns in ((0, 64), (1, 2), (63, 130)):
        assert_rows(source, UP_NAME, whole, (0, 9), (2, 7), columns=columns)


@for_each("step_rows", [1, 2, 5, 100])
def test_gguf_source_nvfp4_factors_multiply_their_own_expert(tmp_path, step_rows):
    """Any rows in steps of any size: inside of an expert, from one to the next, and over all."""
    tensors = {
        UP_EXPERTS: random_blocks("NVFP4", (4, 3, 128), 1),
        "blk.0.ffn_up_exps.scale": plain(np.array([0.3, -1.7, 11.0, 0.01])),
    }
    source = source_of(tmp_path / "model.gguf", tensors)
    whole = expanded(tensors)[UP_EXPERTS].raw
    ranges = [(start, end) for start in range(12) for end in range(start + 1, 13)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf_source, "STEP_ELEMENTS", step_rows * 128)
        assert_rows(source, UP_EXPERTS_NAME, whole, *ranges)
        assert_rows(source, UP_EXPERTS_NAME, whole, *ranges[::9], columns=(60, 70))


def test_gguf_source_nvfp4_factor_of_interleaved_heads(tmp_path):
    tensors = {
        "blk.0.attn_q.weight": random_blocks("NVFP4", (3 * HEAD_DIM, 64), 2),
        "blk.0.attn_q.scale": plain(np.array([0.7])),
    }
    source = source_of(tmp_path / "model.gguf", tensors, HEAD_DIM)
    whole = expanded(tensors)["blk.0.attn_q.weight"].raw
    whole = whole.reshape(3, HEAD_DIM // 2, 2, 64).swapaxes(1, 2).reshape(whole.shape)
    assert_rows(source, "model.layers.0.self_attn.q_proj.weight", whole, (0, 48), (5, 30))


def test_gguf_source_nvfp4_without_factor_keeps_values(tmp_path):
    tensors = {UP: random_blocks("NVFP4", (4, 64), 3), UP_EXPERTS: random_blocks("NVFP4", (2, 3, 64), 4)}
    source = source_of(tmp_path / "model.gguf", tensors)
    assert_rows(source, UP_NAME, tensors[UP].values, (0, 4))
    assert_rows(source, UP_EXPERTS_NAME, tensors[UP_EXPERTS].values, (0, 6))


def test_gguf_source_nvfp4_factors_are_bytes_of_their_weight(tmp_path):
    """No entries of their own, whereas tensors of these names beside other types stay, and are unexpected."""
    tensors = {
        UP: random_blocks("NVFP4", (4, 128), 5),
        "blk.0.ffn_up.scale": plain(np.ones(1)),
        "blk.0.ffn_up.input_scale": plain(np.ones(1)),
        UP_EXPERTS: random_blocks("NVFP4", (2, 3, 64), 6),
        "blk.0.ffn_up_exps.scale": plain(np.ones(2)),
        "blk.0.ffn_down.weight": plain(np.ones((2, 64))),
        "blk.0.ffn_down.scale": plain(np.ones(1)),
        "output.scale": plain(np.ones(1)),
    }
    source = source_of(tmp_path / "model.gguf", tensors)
    down = "model.layers.0.mlp.down_proj.weight"
    assert set(source.entries) == {UP_NAME, UP_EXPERTS_NAME, down, "blk.0.ffn_down.scale", "output.scale"}
    assert source.entries[UP_NAME].num_bytes == 4 * 2 * 36 + 4
    assert source.entries[UP_EXPERTS_NAME].num_bytes == 6 * 36 + 8
    assert not source.ignorable


WRONG = {
    "a number for each row": (UP, plain(np.ones(4))),
    "no vector": (UP, plain(np.ones((1, 1)))),
    "another type": (UP, Stored("F16", np.ones(1, np.float16))),
    "one number for all experts": (UP_EXPERTS, plain(np.ones(1))),
    "one expert short": (UP_EXPERTS, plain(np.ones(2))),
}


@for_each("case", WRONG)
def test_gguf_source_wrong_nvfp4_factors_are_refused(tmp_path, case):
    name, factors = WRONG[case]
    weight = random_blocks("NVFP4", (4, 64) if name == UP else (3, 4, 64), 7)
    with raises_code("gguf.wrong_tensor", ModelFormatError) as caught:
        source_of(tmp_path / "model.gguf", {name: weight, name.replace("weight", "scale"): factors})
    expected = "(1,)" if name == UP else "(3,)"
    assert f"model.gguf: tensor '{name.replace('weight', 'scale')}' is " in str(caught.value)
    assert f"but F32 of shape {expected} is needed" in str(caught.value)


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_read_into_infinite_nvfp4_factor_is_refused_where_it_applies(tmp_path, number):
    tensors = {
        UP_EXPERTS: random_blocks("NVFP4", (2, 3, 64), 8),
        "blk.0.ffn_up_exps.scale": plain(np.array([0.5, number])),
    }
    source = source_of(tmp_path / "model.gguf", tensors)
    assert_rows(source, UP_EXPERTS_NAME, tensors[UP_EXPERTS].values * np.float32(0.5), (0, 3))
    with raises_code("gguf.wrong_tensor", ModelFormatError):
        read_rows(source, UP_EXPERTS_NAME, 2, 4)


def test_gguf_source_nvfp4_factor_may_lie_in_another_part(tmp_path):
    weight, factor = random_blocks("NVFP4", (4, 64), 9), plain(np.array([0.25]))
    for number, tensors in enumerate(({UP: weight}, {"blk.0.ffn_up.scale": factor})):
        path = tmp_path / f"model-{number + 1:05d}-of-00002.gguf"
        write_tensors(path, tensors, split__no=number, split__count=2)
    source = GGUFSource(read_parts(tmp_path / "model-00001-of-00002.gguf"), None)
    assert_rows(source, UP_NAME, weight.values * np.float32(0.25), (0, 4))
