"""Bytes on disk, bytes in memory and why: the default model in every type and scheme, counted by hand; refusals tell it."""

from dataclasses import replace
from pathlib import Path

import pytest

from error_codes import raises_code
from holdfast.config import EngineConfig
from holdfast.distributed.mesh import Mesh
from holdfast.errors import MemoryPlanError
from holdfast.loading.declared import open_declared
from holdfast.memory.devices import GIB
from holdfast.memory.on_disk import DiskAccount, OnDisk, StoredType
from holdfast.memory.sizes import format_bytes
from holdfast.models.declared_model import DeclaredModel
from holdfast.planning.plan import PlanRequest, disk_account, plan_runner
from holdfast.planning.resolve import resolve
from holdfast.planning.target import Target

CPU = Target("cpu", "cpu", 16 * GIB, 16 * GIB, 0, "a test")
GPU = Target("cuda", "a GPU", 16 * GIB, 16 * GIB, GIB, "a test", capability=(9, 0))
LAYERS, HIDDEN, INNER, VOCAB = 30, 576, 1536, 49152
MATRICES = ((960, HIDDEN), (HIDDEN, HIDDEN), (2 * INNER, HIDDEN), (HIDDEN, INNER))
"""Shapes of a layer: the fused q, k and v; o; gate and up; down."""
NUM_NORMS = 2 * LAYERS + 1
DISK_BYTES = 98_362_432
BYTES = {
    "float32": 538_060_032,
    "bfloat16": 269_037_824,
    "fp8": 135_376_640,
    "fp8_tensor": 135_376_640,
    "fp8_block": 134_800_640,
    "int8": 135_376_640,
    "mxfp4": 84_995_840,
}
"""Weights of the default model in memory, in bfloat16 where a scheme leaves a tensor plain."""


def padded(num_bytes: int) -> int:
    """Tensors of an arena begin at multiples of 256."""
    return -(-num_bytes // 256) * 256


def share_by_hand(num_ranks: int, quantized: bool) -> int:
    """One of several ranks, in bfloat16 or int8: rows of what reads x and of the vocabulary, columns of what adds to it."""
    shares = [(960 // num_ranks, HIDDEN), (HIDDEN, HIDDEN // num_ranks)]
    shares += [(2 * INNER // num_ranks, HIDDEN), (HIDDEN, INNER // num_ranks)]
    matrices = [*shares * LAYERS, (VOCAB // num_ranks, HIDDEN)]
    norms = NUM_NORMS * padded(2 * HIDDEN)
    if not quantized:
        return norms + sum(padded(2 * rows * columns) for rows, columns in matrices)
    return norms + sum(padded(rows * columns) + padded(4 * rows) for rows, columns in matrices)


def by_hand(name: str) -> int:
    """The head is the embedding, and int8 with a float32 a row beside any scheme; norms are plain."""
    if name in ("float32", "bfloat16"):
        size = 4 if name == "float32" else 2
        matrices = LAYERS * sum(padded(size * rows * columns) for rows, columns in MATRICES)
        return matrices + padded(size * VOCAB * HIDDEN) + NUM_NORMS * padded(size * HIDDEN)
    total = padded(VOCAB * HIDDEN) + padded(4 * VOCAB) + NUM_NORMS * padded(2 * HIDDEN)
    for rows, columns in MATRICES:
        if name == "mxfp4":
            codes, scales = rows * columns // 2, rows * columns // 32
        elif name == "fp8_block":
            # Parts of 576, 192 and 192 rows meet at multiples of 64: blocks are that low there.
            block_rows = 64 if rows == 960 else 128
            codes, scales = rows * columns, 4 * -(-rows // block_rows) * -(-columns // 128)
        else:
            codes, scales = rows * columns, 4 * rows
        total += LAYERS * (padded(codes) + padded(scales))
    return total


EXPANDED = {"packed_weights": "expanded"}


@pytest.fixture(scope="module")
def default() -> DeclaredModel:
    return open_declared(None)


def account(declared: DeclaredModel, target: Target = CPU, **options) -> DiskAccount:
    found = disk_account(resolve(PlanRequest(EngineConfig(**options), declared, target)))
    assert found is not None
    return found


@pytest.mark.parametrize("name", BYTES)
def test_disk_account_of_default_model_matches_hand_count(default, name):
    is_plain = name in ("float32", "bfloat16")
    options = {"dtype": name} | EXPANDED if is_plain else {"dtype": "bfloat16", "quantization": name}
    found = account(default, **options)
    assert (found.on_disk.num_bytes, found.on_disk.num_files) == (DISK_BYTES, 1)
    assert found.memory_bytes == BYTES[name] == by_hand(name)


def test_account_of_a_rank_is_of_its_share(default):
    """Both numbers: what the rank holds, and what the scheme that is advised would hold of it."""
    resolved = resolve(PlanRequest(EngineConfig(dtype="bfloat16", packed_weights="expanded"), default, CPU))
    found = disk_account(resolved, Mesh(tensor_rank=2, tensor_size=3))
    assert found is not None
    assert (found.memory_bytes, found.other_bytes) == (share_by_hand(3, False), share_by_hand(3, True))
    assert share_by_hand(1, False) == BYTES["bfloat16"]
    assert found.on_disk.num_bytes == DISK_BYTES


def test_embedding_that_is_stored_quantized_is_so_in_the_advice(default):
    """It stays plain beside a scheme else: the advice promises what the option would give."""
    plain = replace(open_declared("Qwen3-8B"), on_disk=default.on_disk._replace(embedding_type=None))
    stored = replace(plain, on_disk=default.on_disk._replace(embedding_type="Q8_0"))
    for model in (plain, stored):
        assert account(model).other_bytes == account(model, quantization="int8").memory_bytes
    assert account(stored).memory_bytes == account(plain).memory_bytes
    embedding = 151936 * 4096
    assert account(plain).other_bytes - account(stored).other_bytes == 3 * embedding - padded(4 * 151936)


def test_disk_account_of_kept_blocks_matches_hand_count(default):
    """Blocks take the bytes of the file, and each group of weights has a line."""
    found = account(default, packed_weights="as_stored")
    matrices = LAYERS * sum(padded(rows * columns // 32 * 20) for rows, columns in MATRICES)
    head, norms = padded(VOCAB * HIDDEN // 32 * 34), NUM_NORMS * padded(4 * HIDDEN)
    assert found.memory_bytes == matrices + head + norms
    stored = sum(one.num_bytes for one in found.on_disk.types)
    assert found.memory_bytes == stored, "every plane fills whole lines of 256 bytes here"
    assert found.reason == "121 of 121 packed weights stay as stored"
    assert [(one.name, one.stored_as, one.num_bytes) for one in found.groups] == [
        ("embed", ("Q8_0",), head),
        ("layers", ("Q4_1", "float32"), matrices + (NUM_NORMS - 1) * padded(4 * HIDDEN)),
        ("final_norm", ("float32",), padded(4 * HIDDEN)),
    ]
    assert found.advice is None
    assert found.as_dict()["groups"]["embed"] == {"stored_as": ("Q8_0",), "bytes": head}
    shared = resolve(PlanRequest(EngineConfig(packed_weights="as_stored"), default, CPU))
    share = disk_account(shared, Mesh(tensor_rank=0, tensor_size=3))
    assert share is not None
    parts = [(960 // 3, HIDDEN), (HIDDEN, HIDDEN // 3), (2 * INNER // 3, HIDDEN), (HIDDEN, INNER // 3)]
    own = LAYERS * sum(padded(rows * columns // 32 * 20) for rows, columns in parts)
    assert share.memory_bytes == own + padded(VOCAB // 3 * HIDDEN // 32 * 34) + norms


def test_plan_on_a_gpu_keeps_blocks_beside_a_lane_of_pieces(default):
    """Weights take the bytes of the file, and the lane has counters and the largest piece, here of the head."""
    request = PlanRequest(EngineConfig(), default, GPU)
    found = disk_account(resolve(request))
    assert found is not None
    assert found.reason == "121 of 121 packed weights stay as stored"
    matrices = LAYERS * sum(padded(rows * columns // 32 * 20) for rows, columns in MATRICES)
    head, norms = padded(VOCAB * HIDDEN // 32 * 34), NUM_NORMS * padded(2 * HIDDEN)
    assert found.memory_bytes == matrices + head + norms
    plan = plan_runner(request)
    piece_rows = 2**24 // HIDDEN // 128 * 128
    lane = next(term for term in plan.memory.terms if term.owner == "workspace/packed")
    assert lane.num_bytes == 16384 + padded(2 * piece_rows * HIDDEN) <= 64 * 2**20 + 16384
    assert not plan.resolved.enforce_eager
    assert account(default, GPU, **EXPANDED).memory_bytes == BYTES["bfloat16"]


def test_stored_types_and_reasons(default):
    found = account(default, **EXPANDED)
    types = {one.name: (one.num_tensors, one.num_bytes) for one in found.on_disk.types}
    matrix_bytes = LAYERS * sum(rows * columns for rows, columns in MATRICES) // 32 * 20
    assert types == {
        "Q4_1": (210, matrix_bytes),
        "F32": (NUM_NORMS, 4 * NUM_NORMS * HIDDEN),
        "Q8_0": (1, VOCAB * HIDDEN // 32 * 34),
    }
    assert found.lines == (
        "on disk    93.81 MiB: 210 Q4_1, 61 F32, 1 Q8_0",
        "in memory  513.13 MiB: blocks are expanded to float32 as they load",
        "           --quantization int8 would hold 129.16 MiB",
    )
    quantized = account(default, quantization="mxfp4")
    assert quantized.reason == "blocks are quantized again, to mxfp4, as they load"
    assert quantized.advice is None
    assert found.other_bytes == account(default, quantization="int8").memory_bytes


def test_lines_fit_80_columns():
    types = tuple(StoredType(name, 999, 1) for name in ("Q4_K", "Q6_K", "F32", "IQ4_XS", "Q8_0"))
    found = DiskAccount(OnDisk(11, 2**40, types, True, "Q8_0"), 2**41, "bfloat16", None, "int8", 2**40)
    assert max(map(len, found.lines)) <= 80
    assert found.lines[1] == "           999 Q8_0"
    assert found.on_disk.summary.startswith("1024.00 GiB in 11 files: 999 Q4_K")
    plain = found._replace(on_disk=found.on_disk._replace(has_blocks=False, types=(StoredType("F16", 9, 1),)))
    assert plain.reason == "tensors are kept in bfloat16 as they load"


def test_refusal_of_a_small_file_shows_its_size_in_memory(default):
    with raises_code("plan.over_budget", MemoryPlanError) as caught:
        plan_runner(PlanRequest(EngineConfig(memory_limit="256MiB", packed_weights="expanded"), default, CPU))
    text = str(caught.value)
    assert "Its 93.81 MiB on disk are 513.13 MiB in memory, since blocks are expanded to float32 as they load" in text
    assert "--quantization int8 would hold 129.16 MiB" in text
    assert "\n" not in text


def test_disk_account_of_plain_weights_is_none():
    declared = open_declared("Qwen3-8B")
    assert disk_account(resolve(PlanRequest(EngineConfig(), declared, CPU))) is None


def test_disk_account_sizes_are_in_memory_document():
    text = (Path(__file__).parents[2] / "docs" / "memory.md").read_text(encoding="utf-8")
    for num_bytes in (DISK_BYTES, *BYTES.values()):
        assert f"| {num_bytes} | {format_bytes(num_bytes)} |" in text
