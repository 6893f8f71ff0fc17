"""What a device's kernels take of packed weights, and the scratch of their products."""

import pytest

from holdfast.kernels.packed_kernels import (
    ARRIVED_BYTES,
    CODED_FAMILIES,
    KERNEL_PIECE_ELEMENTS,
    MOST_SPLIT_ROWS,
    PACKED_KERNELS,
    PARTIAL_BYTES,
    PieceShape,
    code_key,
    has_kernel,
    has_tiles,
    packed_splits,
    piece_bytes,
    piece_rows,
    piece_specs,
)
from holdfast.models.packed_rows import account_for, packed_form
from holdfast.quant.packed_schemes import BLOCK_SCHEMES, integer_scheme, mxfp4_scheme
from holdfast.quant.weight_schemes import PackedPolicy, WeightRecipe

INT4 = integer_scheme("int4", 4, 128, "float16", "uint8")
GPU = WeightRecipe(packed=PackedPolicy("all", device_kind="cuda"))


def test_has_kernel_on_a_gpu_leaves_grids_and_orders_to_the_reference() -> None:
    without = {name for name, scheme in BLOCK_SCHEMES.items() if not has_kernel(scheme, "cuda")}
    assert without == {"IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"}
    assert has_kernel(INT4, "cuda")
    assert not has_kernel(INT4.ordered(4, "int32"), "cuda")
    assert PACKED_KERNELS["cuda"] > CODED_FAMILIES


def test_code_key_knows_zero_points_and_refuses_other_groups() -> None:
    assert code_key(INT4) == "int4_zeros"
    assert code_key(integer_scheme("int4", 4, 0, "float16")) == "int4"
    assert code_key(integer_scheme("int4", 4, 16, "float16")) is None
    assert code_key(integer_scheme("int8", 8, 128, "float16")) is None
    assert code_key(integer_scheme("int4", 4, 64, "float16", "int8")) is None
    assert not has_tiles(BLOCK_SCHEMES["Q4_K"], 128)


def test_packed_splits_cover_every_shape_with_little_waiting() -> None:
    for num_rows in range(128, 60000, 1111):
        for num_columns in (512, 1024, 5120, 8192, 28672):
            splits = packed_splits(num_rows, num_columns)
            assert 1 <= splits <= max(1, min(9, num_columns // 1024))


def test_piece_specs_of_a_gpu_hold_a_piece_or_partial_sums() -> None:
    shape = PieceShape(10240, 5120, has_kernel=True)
    counters, pieces = piece_specs([shape, PieceShape(16, 64, has_kernel=True)], "bfloat16", "cuda")
    assert counters.num_bytes == ARRIVED_BYTES
    rows = piece_rows(10240, 5120, "cuda", by_kernel=True)
    assert pieces.num_bytes == max(2 * rows * 5120, PARTIAL_BYTES) <= 64 * 2**20
    small = PieceShape(256, 2048, has_kernel=True)
    assert packed_splits(256, 2048) == 2
    assert piece_bytes(small, "float16", "cuda") == max(2 * 256 * 2048, 4 * 2 * MOST_SPLIT_ROWS * 256)
    reference = PieceShape(512, 1024)
    assert piece_bytes(reference, "bfloat16", "cuda") == 6 * 512 * 1024
    assert piece_bytes(reference, "float32", "cuda") == 4 * 512 * 1024
    assert piece_rows(10**6, 1024, "cuda", by_kernel=True) == KERNEL_PIECE_ELEMENTS // 1024


@pytest.mark.parametrize("kind", ["linear", "expert"])
def test_account_for_names_experts_without_tiles(kind: str) -> None:
    """Gate and up packed apart, and codes that tiles do not know, take the reference in experts alone."""

    def names(*titles: str) -> tuple[str, ...]:
        schemes = tuple(BLOCK_SCHEMES[title] for title in titles)
        shape = (2, 64 * len(titles), 512) if kind == "expert" else (64 * len(titles), 512)
        form = packed_form(kind, shape, [64] * len(titles), schemes, "bfloat16", GPU)
        assert form is not None
        assert form.rows
        return account_for([(kind, form)], GPU).by_reference

    is_expert = kind == "expert"
    assert names("Q4_K", "Q4_K") == ()
    assert names("Q4_K", "Q6_K") == (("Q4_K", "Q6_K") if is_expert else ())
    assert names("Q2_K") == (("Q2_K",) if is_expert else ())
    assert names("IQ3_S") == ("IQ3_S",)
    quantized = packed_form(kind, (2, 64, 512), [64], (mxfp4_scheme("MXFP4"),), "bfloat16", GPU)
    assert quantized is not None
    assert account_for([(kind, quantized)], GPU).by_reference == ()
