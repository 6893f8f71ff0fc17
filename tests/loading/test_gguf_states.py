"""Gated delta nets in GGUF files: logits of transformers, rows of value heads in turn, blocks that stay as stored, refusals."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from error_codes import raises_code
from for_each import for_each
from holdfast import LLM, SamplingParams
from holdfast.distributed.mesh import Mesh
from holdfast.errors import HoldfastError, UnsupportedModelError
from holdfast.families.state.spec import StateSpec
from holdfast.loading.convert import plan_conversion
from holdfast.loading.declared import open_declared
from holdfast.loading.gguf.file import read_gguf
from holdfast.loading.gguf.source import GGUFSource
from holdfast.loading.gguf.state_rows import StateRows
from holdfast.loading.model_files import open_gguf, open_model
from holdfast.loading.writing.gguf_plan import TYPES_BY_NAME
from kernels.exactness import require_native
from loading.state_files import in_turn, write_state_file
from loading.test_convert import NO_TOKENIZER, quantized
from loading.test_kept_blocks import assert_kept_equals
from models.test_decoder import judge
from models.test_state_models import make_drive, make_requests
from models.tiny_states import make_state_model, save_state_model
from runner.drive import load_model

gguf = pytest.importorskip("gguf")

FILES = ("3.5", "3.5 tied, one key head, five taps, a state last", "3.5 moe", "next")
LENGTHS = (1, 64, 130)
WIDE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
"""A block of 256 columns holds two value heads, which other key heads serve."""


@pytest.mark.parametrize("name", FILES)
def test_gguf_states_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    require_native()
    theirs = make_state_model(name)
    ours = load_model(write_state_file(tmp_path / "tiny.gguf", theirs))
    assert ours.spec.norm_offset == 0.0
    requests = make_requests(LENGTHS)
    drive = make_drive(ours, 100)
    drive.run(requests)
    for request in requests:
        judge(theirs, drive, request)


def test_gguf_states_planned_weights_equal_loaded(tmp_path: Path) -> None:
    path = write_state_file(tmp_path / "tiny.gguf", make_state_model("3.5 moe"))
    assert {weight.name for weight in open_declared(str(path)).parameters()} == set(load_model(path).weights)


def test_gguf_states_older_file_joins_projections_by_key_head(tmp_path: Path) -> None:
    """Files of qwen3next had one tensor for queries, keys, values and gates, as the checkpoint does."""
    theirs = make_state_model("next")
    new, old = (write_state_file(tmp_path / f"{name}.gguf", theirs, joined=name == "old") for name in ("new", "old"))
    weights, others = load_model(new).weights, load_model(old).weights
    assert weights.keys() == others.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(weight, others[name], rtol=0, atol=0)


@pytest.mark.parametrize("name", ["3.5", "3.5 moe", "next"])
def test_gguf_states_kept_blocks_equal_their_values(name: str, tmp_path: Path) -> None:
    """Blocks of 32 columns, and the same values in F32, which the `gguf` package expands."""
    theirs = make_state_model(name, linear_value_head_dim=32, linear_num_value_heads=6, hidden_size=64)
    path = write_state_file(tmp_path / "blocks.gguf", theirs, "Q8_0")
    assert_kept_equals(path, expanded_file(path, theirs))


def test_gguf_states_block_may_hold_two_value_heads(tmp_path: Path) -> None:
    """Columns of the output projection stay in the order of the file: a block of Q4_K cannot be cut."""
    theirs = make_state_model("3.5", **WIDE)
    plain, blocks = write_state_file(tmp_path / "plain.gguf", theirs), tmp_path / "blocks.gguf"
    plan = quantized(plain, blocks, "q4_k")
    assert {tensor.encoding for tensor in plan.tensors if tensor.name.endswith("ssm_out.weight")} == {"Q4_K"}
    assert_kept_equals(blocks, expanded_file(blocks, theirs))


def expanded_file(path: Path, model: Any) -> Path:
    """Write the values of a file's blocks, by the `gguf` package."""
    values = {
        tensor.name: torch.from_numpy(np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type))).float()
        for tensor in gguf.GGUFReader(path).tensors
    }
    return write_state_file(path.with_name("values.gguf"), model, tensors=values)


def test_gguf_states_draft_layer_is_left_unread(tmp_path: Path) -> None:
    theirs = make_state_model("3.5")
    opened = open_gguf(write_state_file(tmp_path / "drafts.gguf", theirs, with_drafts=True))
    opened.source.close()
    assert (opened.spec.num_layers, opened.spec.num_draft_layers) == (4, 1)
    assert opened.source.ignorable == {name for name in opened.source.entries if name.startswith("model.layers.4.")}
    assert len(opened.source.ignorable) == 3


def test_gguf_states_kinds_of_layers_follow_list_or_interval(tmp_path: Path) -> None:
    theirs = make_state_model("3.5")
    without: dict[str, Any] = {"attention.recurrent_layers": None}
    assert states_of(write_state_file(tmp_path / "a.gguf", theirs, **without)).layers == {0, 1, 2}
    two: dict[str, Any] = without | {"full_attention_interval": 2}
    assert states_of(write_state_file(tmp_path / "b.gguf", theirs, **two)).layers == {0, 2}


def states_of(path: Path) -> StateSpec:
    from holdfast.loading.gguf.config import gguf_config
    from holdfast.models.grouped_readers import read_spec

    state = read_spec(gguf_config(read_gguf(path)), path.name).state
    assert state is not None, "no layer keeps a state"
    return state


@for_each(
    "changes, code",
    [
        ({"ssm.inner_size": 97}, "architecture.wrong_value"),
        ({"ssm.group_count": 3}, "architecture.wrong_value"),
        ({"ssm.state_size": None}, "architecture.missing_key"),
        ({"ssm.conv_kernel": 1}, "architecture.wrong_value"),
        ({"rope.dimension_count": 64}, "architecture.wrong_value"),
        ({"attention.value_length": 16}, "gguf.unsupported_setting"),
        ({"attention.scale": 0.5}, "gguf.unsupported_setting"),
        ({"attention.recurrent_layers": [True, False]}, "architecture.wrong_value"),
        ({"attention.recurrent_layers": [True] * 4}, "architecture.wrong_value"),
        ({"attention.key_length": None}, "architecture.missing_key"),
    ],
)
def test_gguf_states_invalid_setting_is_refused(tmp_path: Path, changes: dict[str, Any], code: str) -> None:
    path = write_state_file(tmp_path / "bad.gguf", make_state_model("3.5"), **changes)
    with raises_code(code, HoldfastError) as caught:
        open_gguf(path)
    assert "\n" not in str(caught.value)


def test_gguf_states_rate_above_zero_is_refused_by_name(tmp_path: Path) -> None:
    theirs = make_state_model("3.5")
    bad = {"blk.1.ssm_a": torch.full((4,), 0.5)}
    path = write_state_file(tmp_path / "bad.gguf", theirs, replaced=bad)
    with raises_code("weights.not_finite", HoldfastError) as caught:
        load_model(path)
    assert "model.layers.1.linear_attn.A_log" in str(caught.value)


def test_gguf_states_rates_in_blocks_are_refused(tmp_path: Path) -> None:
    path = write_state_file(tmp_path / "tiny.gguf", make_state_model("3.5"))
    file = read_gguf(path)
    tensor = replace(file.tensors["blk.1.ssm_a"], type=TYPES_BY_NAME["Q8_0"])
    with raises_code("gguf.wrong_tensor", HoldfastError, tensor="blk.1.ssm_a"):
        GGUFSource(
            replace(file, tensors={**file.tensors, tensor.name: tensor}), None, states=StateRows(8, 2, 4, 8, True)
        )


def test_gguf_states_ranks_are_refused_if_heads_are_in_turn(tmp_path: Path) -> None:
    tiled, grouped = (write_state_file(tmp_path / f"{name}.gguf", make_state_model(name)) for name in ("3.5", "next"))
    mesh = Mesh(tensor_size=2)
    assert "output projections" in str(open_declared(str(tiled)).indivisible(mesh))
    assert open_declared(str(grouped)).indivisible(mesh) is None


def test_gguf_states_folder_from_file_is_refused(tmp_path: Path) -> None:
    path = write_state_file(tmp_path / "tiny.gguf", make_state_model("3.5", **WIDE))
    with raises_code("quantize.only_file", UnsupportedModelError):
        plan_conversion(open_model(str(path), "auto"), "int4", NO_TOKENIZER)


@for_each("start, end", [(0, 68), (3, 5), (19, 60), (31, 32), (40, 68)])
def test_state_rows_runs_give_the_rows_of_a_checkpoint(start: int, end: int) -> None:
    """20 rows of queries and keys, then six value heads of eight rows, which two key heads serve."""

    class Config:
        linear_num_key_heads, linear_num_value_heads = 2, 6

    rows = StateRows(20, 2, 6, 8, is_tiled=True)
    stored = in_turn(torch.arange(68), Config, 0, 8, 20)
    runs = list(rows.runs("blk.7.attn_qkv.weight", start, end))
    found = torch.cat([stored[run.file_row : run.file_row + run.num_rows] for run in runs])
    assert torch.equal(found, torch.arange(start, end))
    assert [run.row for run in runs] == [start, *np.cumsum([run.num_rows for run in runs[:-1]]) + start]
    assert [tuple(run) for run in rows.runs("blk.7.ssm_out.weight", start, end)] == [(start, start, end - start)]


@pytest.mark.gpu
@pytest.mark.parametrize("name", FILES[:2])
def test_gguf_states_gpu_log_probabilities_equal_the_folder(name: str, tmp_path: Path) -> None:
    """Products add columns of the output projection in another order, so half precision rounds otherwise."""
    theirs = save_state_model(name, tmp_path / "folder")
    path = write_state_file(tmp_path / "tiny.gguf", theirs)
    found, expected = (gpu_log_probabilities(model) for model in (path, tmp_path / "folder"))
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.05)


def gpu_log_probabilities(model: Path) -> torch.Tensor:
    """Log-probabilities of the tokens of a prompt of more than one chunk, and of the first answers."""
    options: dict[str, Any] = {"tokenizer": "none", "max_model_len": 256, "max_num_seqs": 2, "dtype": "bfloat16"}
    with LLM(str(model), device="cuda", **options) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, prompt_logprobs=0)
        prompt = [(7 * place) % 250 + 3 for place in range(150)]
        (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    rows = zip(prompt[1:], (output.prompt_logprobs or [])[1:], strict=True)
    return torch.tensor([row[token].logprob for token, row in rows if row is not None])
