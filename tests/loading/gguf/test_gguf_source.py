"""GGUF files as sources: names and rows as Hugging Face has them, dequantized, whatever is read and by how many threads."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from for_each import for_each
from holdfast.loading.gguf import source as gguf_source
from holdfast.loading.gguf.file import read_gguf
from holdfast.loading.gguf.source import GGUFSource, hugging_face_name
from holdfast.loading.sources.source import read_rows
from holdfast.quant.packed_values import dequantize_rows
from loading.packed_reads import read_part

gguf = pytest.importorskip("gguf")

HEAD_DIM = 16
NUM_COLUMNS = 256
SCALE_PLACES = {
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "IQ2_XXS": (0,),
    "IQ2_XS": (0,),
    "IQ2_S": (0,),
    "IQ3_XXS": (0,),
    "IQ3_S": (0,),
    "NVFP4": (),
}
"""Types that the gguf package does not quantize to, and where their blocks have float16 scales."""
TYPES = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4", *SCALE_PLACES]
NATIVE = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
Q_NAME, DOWN_NAME = "model.layers.3.self_attn.q_proj", "model.layers.3.mlp.down_proj"


def stored_bytes(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Random blocks of a type; halves and scales stay finite, so that values can be compared."""
    rng = np.random.default_rng(seed)
    kind = getattr(gguf.GGMLQuantizationType, name)
    numbers = rng.standard_normal(shape, dtype=np.float32)
    if name not in SCALE_PLACES:
        return gguf.quants.quantize(numbers, kind)
    block_elements, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (numbers.size // block_elements, block_bytes), dtype=np.uint8)
    for place in SCALE_PLACES[name]:
        blocks[:, place : place + 2] = rng.uniform(-0.1, 0.1, (len(blocks), 1)).astype(np.float16).view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)


def write(path, tensors: dict[str, tuple[str, np.ndarray]]):
    writer = gguf.GGUFWriter(path, "llama")
    for name, (kind, raw) in tensors.items():
        writer.add_tensor(name, raw, raw_dtype=getattr(gguf.GGMLQuantizationType, kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return read_gguf(path)


def values(kind: str, raw: np.ndarray) -> torch.Tensor:
    """What the gguf package makes of it, in the type that a source promises."""
    plain = np.ascontiguousarray(gguf.quants.dequantize(raw, getattr(gguf.GGMLQuantizationType, kind)))
    return torch.from_numpy(plain).to(NATIVE.get(kind, torch.float32))


def half_split(tensor: torch.Tensor) -> torch.Tensor:
    """The reorder of query and key rows, by heads."""
    return tensor.unflatten(0, (-1, HEAD_DIM // 2, 2)).transpose(1, 2).flatten(0, 2)


@pytest.fixture(params=TYPES)
def stored(request, tmp_path):
    """Kind, expected values by name, and a source with a query, an MLP matrix, and vectors, in one type."""
    kind = request.param
    shapes = {
        "blk.3.attn_q.weight": (5 * HEAD_DIM, NUM_COLUMNS),
        "blk.3.ffn_down.weight": (7, 2 * NUM_COLUMNS),
        "blk.3.attn_q.bias": (16 * HEAD_DIM,),
        "blk.3.ffn_down.bias": (256,),
    }
    raw = {name: stored_bytes(kind, shape, seed) for seed, (name, shape) in enumerate(shapes.items())}
    file = write(tmp_path / "model.gguf", {name: (kind, data) for name, data in raw.items()})
    expected = {hugging_face_name(name): values(kind, data) for name, data in raw.items()}
    for name in (f"{Q_NAME}.weight", f"{Q_NAME}.bias"):
        expected[name] = half_split(expected[name])
    source = GGUFSource(file, HEAD_DIM)
    yield kind, expected, source
    source.close()


def test_gguf_source_reads_each_row_range_of_each_type(stored):
    kind, expected, source = stored
    assert set(source.entries) == set(expected)
    for name, whole in expected.items():
        entry = source.entries[name]
        assert entry.shape == tuple(whole.shape)
        assert getattr(torch, entry.dtype) == whole.dtype == NATIVE.get(kind, torch.float32)
        assert entry.file == "model.gguf"
        num_rows = entry.shape[0]
        ranges = {(0, num_rows), (0, 0), (num_rows, num_rows), (0, 1), (num_rows - 1, num_rows), (3, 5)}
        ranges |= {(start, min(start + 13, num_rows)) for start in range(0, num_rows, 13)}
        for start, end in ranges:
            rows = read_rows(source, name, start, end)
            assert rows.dtype == whole.dtype
            torch.testing.assert_close(rows, whole[start:end], rtol=0, atol=0)


@pytest.mark.each_value
@pytest.mark.parametrize("step_elements", [1, 300, 5000])
def test_gguf_source_reads_columns_in_steps_of_any_size(stored, step_elements, monkeypatch):
    _, expected, source = stored
    monkeypatch.setattr(gguf_source, "STEP_ELEMENTS", step_elements)
    for name, whole in expected.items():
        width = whole.shape[-1] if whole.ndim > 1 else 1
        for columns in {(0, width), (0, max(1, width // 2)), (width // 2, width), (width // 3, width // 3 + 1)}:
            # Steps of an element are many: a few rows are as good as all.
            for start, end in ((0, len(whole)), (3, 6))[step_elements == 1 :]:
                wanted = whole[start:end, columns[0] : columns[1]] if whole.ndim > 1 else whole[start:end]
                assert torch.equal(read_rows(source, name, start, end, columns), wanted), (name, columns)


def test_gguf_source_is_thread_safe(stored):
    _, expected, source = stored
    names = list(expected)

    def read(number):
        name = names[number % len(names)]
        start = number % 5
        return torch.equal(read_rows(source, name, start, len(expected[name])), expected[name][start:])

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(read, range(60)))


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K"])
def test_gguf_source_counts_rows_across_stacked_matrices(tmp_path, kind, monkeypatch):
    """A few rows at a time, of one expert or across two."""
    monkeypatch.setattr(gguf_source, "STEP_ELEMENTS", 2 * NUM_COLUMNS)
    raw = stored_bytes(kind, (3, 5, NUM_COLUMNS), 0)
    source = GGUFSource(write(tmp_path / "model.gguf", {"blk.0.ffn_up_exps.weight": (kind, raw)}), None)
    name, whole = "model.layers.0.mlp.experts.up_proj.weight", values(kind, raw.reshape(15, -1))
    assert source.entries[name].shape == (3, 5, NUM_COLUMNS)
    for start, end in ((0, 15), (5, 10), (3, 11)):
        assert torch.equal(read_rows(source, name, start, end), whole[start:end])
    assert source.held_bytes == raw.reshape(15, -1)[:2].nbytes, "blocks of a step; values go straight to their place"


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_gguf_source_shared_expert_gate_is_a_one_row_matrix(tmp_path, kind):
    raw = stored_bytes(kind, (1, NUM_COLUMNS), 0)
    name, whole = "model.layers.0.mlp.shared_expert_gate.weight", values(kind, raw)
    for stored in (raw, raw[0]):
        file = write(tmp_path / "model.gguf", {"blk.0.ffn_gate_inp_shexp.weight": (kind, stored)})
        source = GGUFSource(file, None)
        assert source.entries[name].shape == (1, NUM_COLUMNS)
        assert torch.equal(read_rows(source, name, 0, 1), whole)
        assert torch.equal(read_rows(source, name, 0, 1, (33, 70)), whole[:, 33:70])


def test_gguf_source_scratch_is_bounded_for_large_matrices(tmp_path):
    """A step's blocks, picked and not, and its values; a matrix of a thousand times as many rows needs no more."""
    small, large = (stored_bytes("Q4_0", (rows, 64), 0) for rows in (4096, 8 * 4096))
    needed = [
        GGUFSource(write(tmp_path / f"{n}.gguf", {"output.weight": ("Q4_0", raw)}), None).scratch_bytes_per_reader
        for n, raw in enumerate((small, large))
    ]
    assert needed[0] == needed[1] < 4 * 2**20
    source = GGUFSource(write(tmp_path / "used.gguf", {"output.weight": ("Q4_0", large)}), None)
    read_rows(source, "lm_head.weight", 0, 8 * 4096, (1, 63))
    assert 0 < source.held_bytes <= source.scratch_bytes_per_reader - gguf_source.DEQUANT_BYTES


def test_gguf_source_without_head_dim_keeps_row_order(tmp_path):
    raw = stored_bytes("F32", (2 * HEAD_DIM, 8), 0)
    file = write(tmp_path / "model.gguf", {"blk.3.attn_q.weight": ("F32", raw), "blk.3.attn_k.weight": ("F32", raw)})
    plain, reordered = GGUFSource(file, None), GGUFSource(file, HEAD_DIM)
    for name in plain.entries:
        assert torch.equal(read_rows(plain, name, 0, 2 * HEAD_DIM), torch.from_numpy(raw))
        assert torch.equal(read_rows(reordered, name, 0, 2 * HEAD_DIM), half_split(torch.from_numpy(raw)))
    plain.close()
    reordered.close()


def test_gguf_source_reordered_rows_rotate_as_halves(tmp_path):
    """The reason for the reorder, without reference to how files are converted: attention scores are the same."""
    raw = {name: stored_bytes("F32", (HEAD_DIM, 8), seed) for seed, name in enumerate(("attn_q", "attn_k"))}
    file = write(tmp_path / "model.gguf", {f"blk.0.{name}.weight": ("F32", data) for name, data in raw.items()})
    source = GGUFSource(file, HEAD_DIM)
    angles = torch.linspace(0.1, 2.0, HEAD_DIM // 2)
    x_q, x_k = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))

    def turn(left: torch.Tensor, right: torch.Tensor, position: int) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = (position * angles).cos(), (position * angles).sin()
        return left * cos - right * sin, right * cos + left * sin

    def neighbours(name: str, x: torch.Tensor, position: int) -> torch.Tensor:
        head = torch.from_numpy(raw[name]) @ x
        return torch.stack(turn(head[0::2], head[1::2], position), dim=-1).flatten()

    def halves(name: str, x: torch.Tensor, position: int) -> torch.Tensor:
        rows = read_rows(source, f"model.layers.0.self_attn.{name[-1]}_proj.weight", 0, HEAD_DIM)
        head = rows @ x
        return torch.cat(turn(head[: HEAD_DIM // 2], head[HEAD_DIM // 2 :], position))

    for position in (0, 1, 5):
        stored = neighbours("attn_q", x_q, position) @ neighbours("attn_k", x_k, 0)
        ours = halves("attn_q", x_q, position) @ halves("attn_k", x_k, 0)
        torch.testing.assert_close(ours, stored)
    source.close()


def test_gguf_source_reuses_and_frees_buffers(tmp_path):
    raw = stored_bytes("Q8_0", (64, NUM_COLUMNS), 0)
    source = GGUFSource(write(tmp_path / "model.gguf", {"output.weight": ("Q8_0", raw)}), None)
    read_rows(source, "lm_head.weight", 0, 64)
    held_bytes = source.held_bytes
    kept = read_rows(source, "lm_head.weight", 10, 20)
    assert source.held_bytes == held_bytes > 0
    source.close()
    source.close()
    assert source.held_bytes == 0
    assert torch.equal(read_rows(source, "lm_head.weight", 10, 20), kept)
    source.close()


def test_gguf_source_rotary_tables_are_ignorable(tmp_path):
    tables = {name: ("F32", np.ones(8, np.float32)) for name in ("rope_freqs.weight", "blk.0.attn_rot_embd.weight")}
    others = {"blk.0.attn_sinks.weight": ("F32", np.ones(8, np.float32))}
    source = GGUFSource(write(tmp_path / "model.gguf", tables | others), None)
    assert source.ignorable == set(tables)
    assert set(source.entries) == set(tables) | set(others)


@for_each(
    "theirs, ours",
    [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("output.weight", "lm_head.weight"),
        ("output_norm.weight", "model.norm.weight"),
        ("blk.0.attn_norm.weight", "model.layers.0.input_layernorm.weight"),
        ("blk.12.attn_q.bias", "model.layers.12.self_attn.q_proj.bias"),
        ("blk.1.attn_output.weight", "model.layers.1.self_attn.o_proj.weight"),
        ("blk.1.attn_k_norm.weight", "model.layers.1.self_attn.k_norm.weight"),
        ("blk.1.ffn_norm.weight", "model.layers.1.post_attention_layernorm.weight"),
        ("blk.999999.ffn_gate.weight", "model.layers.999999.mlp.gate_proj.weight"),
        ("blk.01.ffn_up.weight", "blk.01.ffn_up.weight"),
        ("blk.1.ffn_up.scale", "blk.1.ffn_up.scale"),
        ("blk.1.ffn_gate_inp.weight", "model.layers.1.mlp.gate.weight"),
        ("blk.1.ffn_down_exps.weight", "model.layers.1.mlp.experts.down_proj.weight"),
        ("blk.1.ffn_gate_shexp.weight", "model.layers.1.mlp.shared_expert.gate_proj.weight"),
        ("blk.1.ffn_up.0.weight", "blk.1.ffn_up.0.weight"),
        ("blk.1.ffn_up_chexps.weight", "blk.1.ffn_up_chexps.weight"),
        ("blk.١.ffn_up.weight", "blk.١.ffn_up.weight"),
        ("token_embd", "token_embd"),
        ("v.blk.0.ffn_up.weight", "v.blk.0.ffn_up.weight"),
    ],
)
def test_hugging_face_name_of_each_gguf_tensor(theirs, ours):
    assert hugging_face_name(theirs) == ours


def test_source_planes_of_blocks_equal_the_values(stored):
    kind, expected, source = stored
    for name, values_RK in expected.items():
        scheme = source.entries[name].packed
        assert (scheme is not None) == (kind not in NATIVE and values_RK.dim() > 1), f"{name} in {kind}"
        if scheme is None:
            continue
        num_rows, num_columns = values_RK.shape
        for rows, columns in (((0, num_rows), (0, num_columns)), ((3, num_rows - 1), (0, scheme.unit_columns))):
            part = read_part(source, name, scheme, rows, columns)
            found = dequantize_rows(part, 0, (0, part.num_rows), torch.full(part.shape, 7.0))
            assert torch.equal(found, values_RK[slice(*rows), slice(*columns)]), f"{name} in {kind}: {rows}, {columns}"
