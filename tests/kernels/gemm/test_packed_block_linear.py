"""Products with tiles of GGUF blocks: C equals the reference up to rounding, itself to the bit, and writes nothing else."""

import pytest
import torch

from holdfast.kernels.gemm import packed_block_linear as module
from holdfast.kernels.gemm.packed_block_linear import (
    packed_block_linear,
    packed_block_linear_reference,
    packed_block_rows,
    packed_block_rows_reference,
    quantize_parts,
)
from holdfast.quant.packed_schemes import BLOCK_SCHEMES, PackedScheme
from holdfast.quant.packed_tiles import TILE_SCHEMES, TILE_TYPES, input_bytes
from holdfast.quant.tile_values import arrange_reference, fill_tiles, planes_of_tiles
from holdfast.quant.weight_schemes import PackedActivations
from kernels.emulated import PROCESSORS, emulated
from kernels.exactness import EPSILON, companies, island, num_threads, random, same_bits
from kernels.tile_cases import compiled_with, random_planes, random_tiles, tiles_of, variants
from red_zones import RedZones

pytestmark = pytest.mark.usefixtures("native")

CPU = torch.device("cpu")
NAN = float("nan")
TYPES = pytest.mark.parametrize("title", TILE_TYPES)
ACTIVATIONS = pytest.mark.parametrize("activations", ["int8", "full"])


def columns(title: str, size_k: int) -> int:
    """As many columns, or a few more if blocks hold more."""
    unit = BLOCK_SCHEMES[title].unit_columns
    return -(-size_k // unit) * unit


def run(
    x: torch.Tensor,
    weight: tuple[PackedScheme, torch.Tensor],
    activations: PackedActivations,
    bias: torch.Tensor | None = None,
    room_rows: int | None = None,
) -> torch.Tensor:
    """Amid poison, between red zones, into columns of a wider result."""
    zones, (scheme, tiles) = RedZones(CPU), weight
    size_n = 16 * len(tiles)
    wide = zones.allocate(len(x), size_n + 5).fill_(NAN)
    out = wide[:, 2 : 2 + size_n]
    room = zones.allocate(input_bytes(room_rows or len(x), x.shape[1]), dtype=torch.uint8).fill_(0xFF)
    operands = island(x), tiles, scheme, None if bias is None else island(bias)
    assert packed_block_linear(*operands, out, activations, room) is out
    zones.check()
    assert wide[:, :2].isnan().all(), "columns before the result were written"
    assert wide[:, 2 + size_n :].isnan().all(), "columns after the result were written"
    return out.contiguous()


def exact(x: torch.Tensor, weight: tuple[PackedScheme, torch.Tensor], activations: str) -> tuple[torch.Tensor, float]:
    """The product in float64, and the largest sum of absolute products."""
    scheme, tiles = weight
    if activations == "int8":
        codes, scales = quantize_parts(x)
        x = (codes.unflatten(1, (-1, 32)).double() * scales[..., None].double()).flatten(1)
    values = torch.empty(16 * len(tiles), x.shape[1])
    fill_tiles(scheme, tiles, values)
    product = x.double() @ values.double().t()
    return product, float((x.double().abs() @ values.double().abs().t()).max()) if product.numel() else 0.0


@pytest.mark.each_pair
@TYPES
@ACTIVATIONS
@pytest.mark.parametrize("num_rows", [1, 2, 3, 7, 8, 21], ids=lambda count: f"{count} rows")
@pytest.mark.parametrize("size_k", [32, 96, 256, 288, 1024], ids=lambda size: f"K{size}")
def test_packed_block_linear_equals_exact_product_up_to_rounding(title, activations, num_rows, size_k):
    size_k = columns(title, size_k)
    for size_n in (16, 48):
        x, weight, bias = random(num_rows, size_k), random_tiles(title, size_n, size_k), random(size_n, seed=3)
        expected, magnitude = exact(x, weight, activations)
        # A sum of 32 rounds up to 32 times, and each part once more.
        allowed = (32 + size_k / 32) * EPSILON * magnitude / 4
        assert (run(x, weight, activations).double() - expected).abs().max() <= allowed
        assert (run(x, weight, activations, bias).double() - expected - bias).abs().max() <= allowed + EPSILON * 8


@TYPES
def test_int8_sums_are_exact(title):
    # Powers of two as scales make every product and sum exact, so order cannot hide a wrong one.
    size_k, size_n = columns(title, 128), 32
    planes = random_planes(title, size_n, size_k)
    for plane, values in zip(BLOCK_SCHEMES[title].planes, planes, strict=True):
        if plane.dtype == "float16":
            values.fill_(0.25)
        elif title == "MXFP4" and plane.name == "scales":
            values.fill_(126)
    weight = TILE_SCHEMES[title], tiles_of(title, planes, size_k)
    x = torch.randint(-127, 128, (5, size_k), generator=torch.Generator().manual_seed(1)).float()
    x[:, ::32] = 127.0  # so that a part's scale is 1
    assert torch.equal(run(x, weight, "int8").double(), exact(x, weight, "int8")[0])


@TYPES
@pytest.mark.parametrize("extreme", ["least", "most"])
def test_extreme_codes_do_not_overflow(title, extreme):
    size_k = columns(title, 64)
    planes = random_planes(title, 16, size_k)
    for plane, values in zip(BLOCK_SCHEMES[title].planes, planes, strict=True):
        if plane.name in ("codes", "fifth", "third", "high"):
            values.view(torch.uint8).fill_({"least": 0x80 if plane.dtype == "int8" else 0, "most": 0xFF}[extreme])
            if plane.dtype == "int8" and extreme == "most":
                values.fill_(127)
    weight = TILE_SCHEMES[title], tiles_of(title, planes, size_k)
    x = torch.full((3, size_k), 127.0)
    x[1], x[2, ::2] = -127.0, -127.0
    expected, magnitude = exact(x, weight, "int8")
    assert (run(x, weight, "int8").double() - expected).abs().max() <= 16 * EPSILON * magnitude


@pytest.mark.each_pair
@TYPES
@ACTIVATIONS
@pytest.mark.parametrize("variant", variants())
def test_every_instruction_set_gives_equal_bits(title, activations, variant, monkeypatch):
    size_k = columns(title, 352)
    x, weight, bias = random(11, size_k), random_tiles(title, 48, size_k), random(48, seed=3)
    x[2, :32], x[3] = 0.0, x[3] * 1e-30
    results = run(x, weight, activations, bias), run(x[:1], weight, activations)
    library = compiled_with(variants()[variant])
    monkeypatch.setattr(module, "native_for", lambda *tensors: library)
    assert same_bits(run(x, weight, activations, bias), results[0])
    assert same_bits(run(x[:1], weight, activations), results[1])


@pytest.mark.each_pair
@TYPES
@ACTIVATIONS
@pytest.mark.parametrize("processor", PROCESSORS)
def test_emulated_processor_gives_equal_bits(title, activations, processor, monkeypatch):
    size_k = columns(title, 352)
    x, weight, bias = random(11, size_k), random_tiles(title, 48, size_k), random(48, seed=3)
    x[2, :32], x[3] = 0.0, x[3] * 1e-30
    rows = (slice(0, 11), slice(0, 1), slice(4, 7))
    results = [run(x[some], weight, activations, bias) for some in rows]
    library = emulated(PROCESSORS[processor])
    monkeypatch.setattr(module, "native_for", lambda *tensors: library)
    for some, result in zip(rows, results, strict=True):
        assert same_bits(run(x[some], weight, activations, bias), result)


@pytest.mark.each_value
@TYPES
@ACTIVATIONS
def test_packed_block_linear_is_batch_invariant(title, activations):
    size_k = columns(title, 160)
    x, weight, bias = random(130, size_k), random_tiles(title, 80, size_k), random(80, seed=3)
    whole = run(x, weight, activations, bias)
    for threads in (1, 2, 3):
        with num_threads(threads):
            for rows in companies(len(x)):
                assert same_bits(run(x[rows], weight, activations, bias), whole[rows]), f"{threads=} {rows=}"


@pytest.mark.parametrize("room_rows", [1, 3, 8, 9])
def test_small_room_changes_nothing(room_rows):
    x, weight = random(21, 512), random_tiles("Q4_K", 32, 512)
    assert same_bits(run(x, weight, "int8", room_rows=room_rows), run(x, weight, "int8"))


def test_many_rows_pass_in_blocks():
    # More rows than keep their sums on the stack, and than stay in the cache.
    x, weight = random(300, 2048), random_tiles("Q4_0", 16, 2048)
    for activations in ("int8", "full"):
        whole = run(x, weight, activations)
        for row in (0, 100, 299):
            assert same_bits(run(x[row : row + 1], weight, activations)[0], whole[row]), f"{activations} {row=}"


def test_no_rows_write_nothing():
    for activations in ("int8", "full"):
        assert run(random(0, 64), random_tiles("Q4_0", 16, 64), activations).shape == (0, 16)


@ACTIVATIONS
@pytest.mark.parametrize("hostile", [NAN, float("inf"), -float("inf")])
def test_row_that_is_not_finite_spoils_no_other(activations, hostile):
    x, weight = random(9, 96), random_tiles("Q5_1", 16, 96)
    clean = run(x, weight, activations)
    x[4, 40] = hostile
    spoilt = run(x, weight, activations)
    assert not spoilt[4].isfinite().any()
    others = [0, 1, 2, 3, 5, 6, 7, 8]
    assert same_bits(spoilt[others], clean[others])


@pytest.mark.parametrize("scale", [0.0, 1e-45, 1e-38, 1e-36, 1e-30, 1e30, 3e38])
def test_quantized_parts_of_any_size_are_finite(scale):
    x, weight = random(2, 64).clamp(-1, 1) * scale, random_tiles("Q8_0", 16, 64)
    expected, magnitude = exact(x, weight, "int8")
    out = run(x, weight, "int8")
    if scale < 1e38:
        assert (out.double() - expected).abs().max() <= 16 * EPSILON * magnitude + 1e-36
    codes, scales = quantize_parts(x)
    assert codes.abs().max() <= 127
    assert scales.isfinite().all()
    error = (
        (codes.unflatten(1, (-1, 32)).double() * scales[..., None] - x.unflatten(1, (-1, 32)).double()).abs().amax(2)
    )
    assert (error <= scales.double() * 0.501 + 1.6e-36).all()


def test_int8_activations_round_half_to_even():
    x = torch.zeros(1, 32)
    x[0, :5] = torch.tensor([127.0, 0.5, 1.5, -2.5, -126.5])
    codes, scales = quantize_parts(x)
    assert scales.item() == 1.0
    assert codes[0, :5].tolist() == [127, 0, 2, -2, -126]
    weight = TILE_SCHEMES["Q8_0"], tiles_of("Q8_0", [torch.eye(16, 32).to(torch.int8), torch.ones(16, 1).half()], 32)
    assert run(x, weight, "int8")[0, :5].tolist() == [127, 0, 2, -2, -126]


@TYPES
def test_rows_equal_values(title):
    size_k = columns(title, 96)
    scheme, tiles = random_tiles(title, 64, size_k)
    values = torch.empty(64, size_k)
    fill_tiles(scheme, tiles, values)
    ids, zones = torch.tensor([63, 0, 17, 17, 40]), RedZones(CPU)
    out = zones.allocate(5, size_k)
    assert packed_block_rows(ids, tiles, scheme, out) is out
    zones.check()
    assert torch.equal(out, values[ids])
    assert torch.equal(packed_block_rows_reference(ids, tiles, scheme, torch.empty(5, size_k)), values[ids])
    assert packed_block_rows(ids[:0], tiles, scheme, out[:0]).shape == (0, size_k)


@pytest.mark.parametrize("index", [-1, 32])
def test_row_outside_of_table_raises(index):
    scheme, tiles = random_tiles("Q4_0", 32, 64)
    with pytest.raises(IndexError, match=f"ids {index} to {index} of a table with 32 rows"):
        packed_block_rows(torch.tensor([index]), tiles, scheme, torch.empty(1, 64))


@TYPES
def test_arranged_planes_come_back(title):
    size_k = columns(title, 224)
    planes, scheme = random_planes(title, 48, size_k), TILE_SCHEMES[title]
    zones = RedZones(CPU)
    tiles = zones.allocate(3, scheme.planes[0].row_elements(size_k), dtype=torch.uint8)
    assert arrange_reference(scheme, planes, tiles) is tiles
    zones.check()
    for found, expected in zip(planes_of_tiles(scheme, tiles), planes, strict=True):
        assert same_bits(found, expected)


def test_without_compiler_reference_runs(monkeypatch):
    monkeypatch.setattr(module, "native_for", lambda *tensors: None)
    x, weight = random(3, 256), random_tiles("Q4_K", 32, 256)
    for activations in ("int8", "full"):
        expected = torch.empty(3, 32)
        packed_block_linear_reference(x, weight[1], weight[0], None, expected, activations)
        assert same_bits(run(x, weight, activations), expected)


def test_wrong_shapes_are_refused():
    scheme, tiles = random_tiles("Q4_0", 32, 64)
    x, out = random(2, 64), torch.empty(2, 32)
    with pytest.raises(AssertionError, match="not 864 bytes a group"):
        packed_block_linear(random(2, 96), tiles, scheme, None, out, "int8")
    with pytest.raises(AssertionError, match="out_TN"):
        packed_block_linear(x, tiles, scheme, None, torch.empty(2, 31), "int8")
    with pytest.raises(AssertionError, match="bias_N"):
        packed_block_linear(x, tiles, scheme, torch.empty(31), out, "full")
    with pytest.raises(AssertionError, match="hold no row"):
        packed_block_linear(x, tiles, scheme, None, out, "int8", torch.empty(8, dtype=torch.uint8))
