"""Models in IQ2, IQ3 and NVFP4 through the engine: weights and logits of the same model in F32, and bytes on disk."""

from pathlib import Path

import numpy as np
import torch

from error_codes import raises_code
from for_each import for_each
from holdfast.errors import ModelFormatError
from holdfast.loading.declared import open_declared
from holdfast.loading.gguf.parts import on_disk
from holdfast.loading.model_files import open_gguf
from holdfast.loading.planning.plan import plan_load
from kernels.exactness import same_bits
from loading.block_files import GRID_TYPES, Stored, expanded, model_tensors, plain, write_tensors
from models.test_decoder import EVERY_POSITION, make_drive
from runner.drive import LoadedModel, Request, load_model

CASES = [*((kind, "qwen3") for kind in GRID_TYPES), ("NVFP4", "qwen3"), ("NVFP4", "qwen3moe"), ("IQ2_S", "qwen3moe")]


def run(model: LoadedModel) -> tuple[list[int], dict[int, torch.Tensor]]:
    request = Request([3, 14, 15, 9, 26, 5, 30], 4, 0, EVERY_POSITION)
    drive = make_drive(model, "torch_paged", max_num_batched_tokens=16)
    drive.run([request])
    return request.output, drive.logits(request)


@for_each("kind, arch", CASES)
def test_model_of_blocks_runs_as_its_float32_values(tmp_path, kind, arch):
    tensors = model_tensors(kind, arch)
    write_tensors(tmp_path / "blocks.gguf", tensors, arch)
    write_tensors(tmp_path / "plain.gguf", expanded(tensors), arch)
    ours, theirs = (load_model(tmp_path / name) for name in ("blocks.gguf", "plain.gguf"))
    assert ours.weights.keys() == theirs.weights.keys()
    for name, weight in ours.weights.items():
        other = theirs.weights[name]
        assert isinstance(weight, torch.Tensor)
        assert isinstance(other, torch.Tensor)
        assert same_bits(weight, other), name
    (output, logits), (expected, expected_logits) = run(ours), run(theirs)
    assert output == expected
    for position, row in logits.items():
        assert bool(row.isfinite().all())
        assert same_bits(row, expected_logits[position])


@for_each("kind, arch", CASES)
def test_open_gguf_model_of_blocks_counts_every_byte(tmp_path, kind, arch):
    """On disk by type, and as read: each byte of a tensor belongs to one move."""
    path, tensors = tmp_path / "blocks.gguf", model_tensors(kind, arch)
    write_tensors(path, tensors, arch)
    opened = open_gguf(path)
    assert opened.gguf is not None
    disk = on_disk(opened.gguf)
    assert disk.num_bytes == path.stat().st_size
    blocks = [stored for stored in tensors.values() if stored.kind == kind]
    by_type = {held.name: (held.num_tensors, held.num_bytes) for held in disk.types}
    assert by_type[kind] == (len(blocks), sum(stored.raw.nbytes for stored in blocks))
    assert by_type["F32"][1] == sum(stored.raw.nbytes for stored in tensors.values() if stored.kind == "F32")
    assert (disk.has_blocks, disk.embedding_type) == (True, kind)
    plan = plan_load(opened.parameters, opened.source, "float32")
    used = {name: stored for name, stored in tensors.items() if not name.endswith("input_scale")}
    assert sum(move.num_bytes for move in plan.moves) == sum(stored.raw.nbytes for stored in used.values())
    values = expanded(tensors)
    assert plan.final_bytes == sum(stored.raw.nbytes for stored in values.values())
    opened.source.close()


def with_changes(path: Path, changes: dict[str, Stored | None]) -> Path:
    tensors: dict[str, Stored | None] = model_tensors("NVFP4") | changes
    write_tensors(path, {name: stored for name, stored in tensors.items() if stored is not None})
    return path


def test_open_declared_misplaced_nvfp4_factors_have_no_plan(tmp_path):
    """A factor of a norm, of a tied head and of a tensor that is absent: all would be left out."""
    assert open_declared(str(with_changes(tmp_path / "whole.gguf", {}))).num_layers == 1
    for name in ("output_norm.scale", "blk.0.attn_norm.scale", "blk.1.attn_q.scale"):
        path = with_changes(tmp_path / "more.gguf", {name: plain(np.ones(1))})
        with raises_code("weights.unexpected_tensors", ModelFormatError):
            open_declared(str(path))
    tied = with_changes(tmp_path / "tied.gguf", {"output.weight": None})
    with raises_code("weights.unexpected_tensors", ModelFormatError):
        open_declared(str(tied))
