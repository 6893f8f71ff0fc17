"""Parts of scales: which stored scale stands for how many of ours (numbers: test_stored_schemes.py)."""

import pytest

from holdfast.loading.planning.stored_schemes import mx_codes, scale_parts
from holdfast.models.parameters import Part
from holdfast.quant.weight_schemes import FP8, FP8_BLOCK, MXFP4
from loading.header_source import entry


def runs(parts):
    return [(part.row_start, part.row_range, part.repeats) for part in parts]


@pytest.mark.parametrize(
    ("part", "block_rows", "wanted"),
    [
        (Part("t", 0, (256, 128)), 128, [(0, (0, 2), 1)]),
        (Part("t", 0, (256, 128)), 64, [(0, (0, 2), 2)]),
        (Part("t", 0, (320, 128)), 64, [(0, (0, 2), 2), (4, (2, 3), 1)]),
        (Part("t", 0, (200, 128)), 128, [(0, (0, 2), 1)]),
        (Part("t", 0, (512, 128), rows=(64, 448)), 64, [(0, (0, 1), 1), (1, (1, 3), 2), (5, (3, 4), 1)]),
        (Part("t", 0, (2, 192, 128)), 64, [(0, (0, 1), 2), (2, (1, 2), 1), (3, (2, 3), 2), (5, (3, 4), 1)]),
        (Part("t", 0, (2, 256, 128)), 128, [(0, (0, 4), 1)]),
        (Part("t", 0, (2, 256, 128), rows=(128, 384)), 128, [(0, (1, 3), 1)]),
    ],
    ids=["whole", "halves", "a part block", "ragged", "a share", "odd matrices", "matrices", "a share of matrices"],
)
def test_blocks_stand_for_as_many_of_ours_as_they_hold(part, block_rows, wanted):
    settled = FP8_BLOCK.with_parts([block_rows])
    parts = scale_parts([part], FP8_BLOCK, settled, ("_scale_inv",), {})
    assert runs(parts) == wanted
    for own in parts:
        own.check()
        assert own.tensor == "t_scale_inv"


def test_scales_of_a_transposed_tensor_are_transposed():
    part = Part("t", 0, (2, 384, 256), is_transposed=True, columns=(128, 384))
    (own,) = scale_parts([part], FP8_BLOCK, FP8_BLOCK, ("_scale_inv",), {})
    assert (own.shape, own.is_transposed, own.columns, own.num_rows) == ((2, 3, 2), True, (1, 3), 4)
    (own,) = scale_parts([part], FP8, FP8, ("_scale",), {})
    assert (own.shape, own.num_rows, own.num_columns) == ((2, 1, 256), 512, 1)


def test_parts_follow_one_another_and_the_name_that_is_there_is_taken():
    entries = {name: entry(name, shape, "float32") for name, shape in (("a_scale_inv", (1, 2)), ("b_scale", (2, 2)))}
    parts = scale_parts(
        [Part("a", 0, (128, 256)), Part("b", 128, (256, 256))], FP8_BLOCK, FP8_BLOCK, ("_scale_inv", "_scale"), entries
    )
    assert [(part.tensor, part.row_start) for part in parts] == [("a_scale_inv", 0), ("b_scale", 1)]


@pytest.mark.parametrize(
    ("shape", "wanted"),
    [((6, 1), [(0, (2, 4), 1)]), ((6,), [(0, (2, 4), 1)]), ((1,), [(0, (0, 1), 2)]), ((), [(0, (0, 1), 2)])],
)
def test_scales_by_row_or_tensor(shape, wanted):
    part = Part("t", 0, (6, 8), rows=(2, 4), whole_rows=(0, 6))
    assert runs(scale_parts([part], FP8, FP8, ("_scale",), {"t_scale": entry("t_scale", shape, "float32")})) == wanted


@pytest.mark.parametrize("is_transposed", [False, True])
def test_scales_by_row_of_matrices_in_one_row_each(is_transposed):
    part = Part("t", 0, (2, 8, 6) if is_transposed else (2, 6, 8), rows=(2, 9), is_transposed=is_transposed)
    parts = scale_parts([part], FP8, FP8, ("_scale",), {"t_scale": entry("t_scale", (2, 6), "float32")})
    assert runs(parts) == [(0, (2, 6), 1), (4, (0, 3), 1)]
    assert [own.columns for own in parts] == [(0, 1), (1, 2)]
    for own in parts:
        own.check()


def test_mxfp4_parts():
    part = Part("experts.down_proj", 6, (2, 96, 3), rows=(0, 3), columns=(32, 96), is_transposed=True)
    codes = mx_codes(part, MXFP4)
    codes.check()
    assert codes.tensor == "experts.down_proj_blocks"
    assert (codes.shape, codes.columns, codes.source_rows, codes.source_columns) == ((2, 3, 3, 16), (16, 48), 6, 48)
    assert (codes.row_start, codes.rows, codes.matrix_rows) == (6, (0, 3), 3)
    (scales,) = scale_parts([codes], MXFP4, MXFP4, (), {})
    scales.check()
    assert (scales.tensor, scales.shape, scales.rows, scales.columns) == (
        "experts.down_proj_scales",
        (2, 3, 3),
        (0, 3),
        (1, 3),
    )
    assert mx_codes(Part("a.weight", 0, (6, 64)), MXFP4).tensor == "a_blocks"
