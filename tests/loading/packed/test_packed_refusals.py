"""Packed checkpoints that are wrong: one error that names the tensor, from the headers, or else at the first read."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from error_codes import raises_code
from for_each import for_each
from holdfast.errors import ModelFormatError, UnsupportedModelError
from holdfast.loading.declared import open_declared
from holdfast.loading.execution import execute
from holdfast.loading.execution.execute import load_weights
from holdfast.loading.model_files import open_directory
from holdfast.loading.planning.plan import plan_load
from holdfast.loading.sources.source import read_rows
from holdfast.memory.ledger import Ledger
from holdfast.quant.weight_schemes import AS_STORED, WeightRecipe
from loading.packed import packed_settings, packers
from loading.packed.packed_models import MODELS, MOE, make_packed, rewrite, with_settings
from loading.packed.test_kept_models import KEPT

Tensors = dict[str, torch.Tensor]
MODULE = "model.layers.0.mlp.up_proj"
NAME = f"{MODULE}.weight"
NAN, INFINITE = float("nan"), float("inf")


def without(suffix: str) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.__delitem__(MODULE + suffix)


def changed(suffix: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({MODULE + suffix: change(tensors[MODULE + suffix]).contiguous()})


def added(suffix: str, values: torch.Tensor) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({MODULE + suffix: values})


@contextmanager
def raises_code_in(*codes: str) -> Iterator[None]:
    with pytest.raises((ModelFormatError, UnsupportedModelError)) as caught:
        yield
    assert caught.value.code in codes, str(caught.value)


def load(folder: Path, recipe: WeightRecipe = AS_STORED) -> None:
    opened = open_directory(folder)
    plan = plan_load(opened.parameters, opened.source, "float32", recipe)
    load_weights(plan, opened.source, "cpu", Ledger(), lambda done, total: None)


RECIPES = AS_STORED, KEPT
"""Expanded, and kept as stored."""


@for_each(
    "kind, change, code, tensor",
    [
        ("awq", without(".scales"), "weights.packed_missing", ".qweight"),
        ("awq", without(".qzeros"), "weights.packed_missing", ".qweight"),
        ("gptq", without(".g_idx"), "weights.packed_missing", ".qweight"),
        ("gptq", without(".qzeros"), "weights.packed_missing", ".qweight"),
        ("pack-quantized", without(".weight_zero_point"), "weights.packed_missing", ".weight_packed"),
        ("nvfp4", without(".weight_global_scale"), "weights.packed_missing", ".weight_packed"),
        ("modelopt", without(".weight_scale_2"), "weights.packed_missing", ".weight"),
        ("awq", changed(".qweight", lambda t: t[:-1]), "weights.wrong_shape", ".qweight"),
        ("awq", changed(".qweight", lambda t: t[:, :, None]), "weights.wrong_shape", ".qweight"),
        ("awq", changed(".scales", lambda t: t[:-1]), "weights.wrong_shape", ".scales"),
        ("awq", changed(".scales", lambda t: t.T), "weights.wrong_shape", ".scales"),
        ("awq", changed(".qzeros", lambda t: t[:, :-1]), "weights.wrong_shape", ".qzeros"),
        ("gptq", changed(".qweight", lambda t: t.T), "weights.wrong_shape", ".qweight"),
        ("gptq", changed(".g_idx", lambda t: t[:-1]), "weights.wrong_shape", ".g_idx"),
        ("pack-quantized", changed(".weight_scale", lambda t: t[:, :1]), "weights.wrong_shape", ".weight_scale"),
        ("int-quantized", changed(".weight_scale", lambda t: t[:-1]), "weights.wrong_shape", ".weight_scale"),
        ("nvfp4", changed(".weight_scale", lambda t: t[:-1]), "weights.wrong_shape", ".weight_scale"),
        ("nvfp4", changed(".weight_global_scale", lambda t: t.repeat(2)), "weights.wrong_shape", "global_scale"),
        ("pack-quantized", changed(".weight_shape", lambda t: t.repeat(9)), "weights.wrong_shape", ".weight_shape"),
        ("pack-quantized", changed(".weight_shape", lambda t: t.half()), "weights.unsupported_dtype", "weight_shape"),
        ("gptq", added(".bias", torch.zeros(999)), "weights.wrong_shape", ".bias"),
        ("awq", changed(".scales", lambda t: t.to(torch.int16)), "weights.unsupported_dtype", ".scales"),
        ("gptq", changed(".qzeros", lambda t: t.to(torch.int64)), "weights.unsupported_dtype", ".qzeros"),
        ("gptq", changed(".g_idx", lambda t: t.half()), "weights.unsupported_dtype", ".g_idx"),
        ("mxfp4", changed(".weight_scale", lambda t: t.float()), "weights.unsupported_dtype", ".weight_scale"),
        ("nvfp4", changed(".weight_scale", lambda t: t.float()), "weights.unsupported_dtype", ".weight_scale"),
        ("modelopt", added(".pre_quant_scale", torch.ones(64)), "weights.packed_format", ".pre_quant_scale"),
        ("modelopt", added("x.experts.gate_up_proj_weight_scale", torch.ones(2)), "weights.packed_format", "_scale"),
        ("awq", added(".weight", torch.ones(128, 64)), "weights.duplicate_tensor", ".weight"),
    ],
)
def test_open_directory_wrong_packed_tensors_are_named(
    kind: str, change: Callable[[Tensors], None], code: str, tensor: str, tmp_path: Path
) -> None:
    folder = make_packed(tmp_path / kind / code, *MODELS[kind])
    rewrite(folder, change)
    with raises_code(code) as caught:
        open_directory(folder)
    assert str(caught.value.values["tensor"]).endswith(tensor)
    assert caught.value.values["file"] == "model.safetensors"


@for_each(
    "kind, change, suffix, words",
    [
        ("gptq", changed(".g_idx", lambda t: t + 1), ".g_idx", "names the groups 1 to 2, and there are 2"),
        ("gptq", changed(".g_idx", lambda t: t - 1), ".g_idx", "names the groups -1 to 0"),
        ("gptq", changed(".g_idx", lambda t: t * 0), ".g_idx", "every input into the group 0"),
        (
            "gptq",
            changed(".g_idx", lambda t: t.index_fill(0, t.argmin(), 1)),
            ".g_idx",
            "puts 31 inputs into the group 0",
        ),
        ("nvfp4", changed(".weight_global_scale", lambda t: t * 0), ".weight_global_scale", "is 0, and"),
        ("nvfp4", changed(".weight_global_scale", lambda t: t * INFINITE), ".weight_global_scale", "is inf, and"),
        ("nvfp4", changed(".weight_global_scale", lambda t: t * 0 + 1e-42), ".weight_global_scale", "is 1.00053e-42"),
        ("modelopt", changed(".weight_scale_2", lambda t: t * 0 + 3e38), ".weight_scale_2", "is 3e+38"),
        ("modelopt", changed(".weight_scale_2", lambda t: t * NAN), ".weight_scale_2", "is nan"),
        ("gptq", added(".bias", torch.ones(128)), ".bias", "is not zero"),
        ("pack-quantized", changed(".weight_shape", lambda t: t.flip(0)), ".weight_shape", "says [64, 128]"),
    ],
)
def test_load_wrong_packed_values_are_named(
    kind: str, change: Callable[[Tensors], None], suffix: str, words: str, tmp_path: Path
) -> None:
    """Before memory is taken."""
    folder = make_packed(tmp_path / kind / suffix, *MODELS[kind])
    rewrite(folder, change)
    for recipe in RECIPES:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(execute, "Arena", None)
            with raises_code("weights.packed_values", ModelFormatError, tensor=MODULE + suffix) as caught:
                load(folder, recipe)
        assert words in str(caught.value)


@for_each("bits", [4, 8])
def test_load_symmetric_gptq_with_other_zero_points_is_refused(bits: int, tmp_path: Path) -> None:
    make = lambda rng, rows, columns: packers.gptq(rng, rows, columns, 32, bits=bits, sym=True)  # noqa: E731
    folder = make_packed(tmp_path / str(bits), packed_settings.gptq(32, bits=bits, sym=True), make)
    load(folder)
    rewrite(folder, changed(".qzeros", lambda t: t ^ 2))
    with raises_code("weights.packed_values", ModelFormatError, tensor=f"{MODULE}.qzeros"):
        load(folder)


def test_load_symmetric_gptq_may_lack_zero_points_and_order(tmp_path: Path) -> None:
    make = lambda rng, rows, columns: packers.gptq(rng, rows, columns, 32, sym=True)  # noqa: E731
    folder = make_packed(tmp_path / "model", packed_settings.gptq(32, sym=True), make)
    rewrite(folder, lambda tensors: [tensors.pop(n) for n in [*tensors] if n.endswith((".qzeros", ".g_idx"))])
    load(folder)


def test_load_unset_group_index_counts_as_runs(tmp_path: Path) -> None:
    """Zeros of GPTQ without act-order, and -1 of compressed-tensors, were never filled in."""
    make = lambda rng, rows, columns: packers.gptq(rng, rows, columns, 32)  # noqa: E731
    folder = make_packed(tmp_path / "gptq", packed_settings.gptq(32), make)
    wanted = load_one(folder)
    rewrite(folder, changed(".g_idx", lambda t: t * 0))
    assert torch.equal(load_one(folder), wanted)
    folder = make_packed(tmp_path / "int", *MODELS["pack-quantized"])
    wanted = load_one(folder)
    rewrite(folder, added(".weight_g_idx", torch.full((64,), -1, dtype=torch.int32)))
    assert torch.equal(load_one(folder), wanted)


def load_one(folder: Path) -> torch.Tensor:
    opened = open_directory(folder)
    values = read_rows(opened.source, NAME, 0, 128)
    opened.source.close()
    return values


def test_load_zero_biases_of_gptq_are_left_out(tmp_path: Path) -> None:
    folder = make_packed(tmp_path / "model", *MODELS["gptq"])
    rewrite(folder, added(".bias", torch.zeros(128)))
    load(folder)


@for_each(
    "kind, change",
    [
        ("awq", changed(".scales", lambda t: t.index_fill(1, torch.tensor([3]), float("nan")))),
        ("gptq", changed(".scales", lambda t: t.index_fill(1, torch.tensor([3]), float("inf")))),
        ("pack-quantized", changed(".weight_scale", lambda t: t.index_fill(0, torch.tensor([3]), float("nan")))),
        ("pack-quantized", changed(".weight_scale", lambda t: t.index_fill(0, torch.tensor([3]), 3e38))),
        ("int-quantized", changed(".weight_scale", lambda t: t.index_fill(0, torch.tensor([3]), NAN))),
        ("nvfp4", changed(".weight_scale", lambda t: t.float().index_fill(0, torch.tensor([3]), NAN).to(t.dtype))),
        ("mxfp4", changed(".weight_scale", lambda t: t.index_fill(0, torch.tensor([3]), 255))),
        ("mxfp4", changed(".weight_scale", lambda t: t.index_fill(0, torch.tensor([3]), 253))),
    ],
)
def test_load_scales_that_are_not_finite_are_refused(
    kind: str, change: Callable[[Tensors], None], tmp_path: Path
) -> None:
    folder = make_packed(tmp_path / kind, *MODELS[kind])
    rewrite(folder, change)
    for recipe in RECIPES:
        with raises_code("weights.not_finite", ModelFormatError, tensor=NAME):
            load(folder, recipe)


def test_load_int4_bytes_beyond_4_bits_are_refused(tmp_path: Path) -> None:
    said = packed_settings.compressed("int-quantized", packed_settings.integers(-1, 4))
    folder = make_packed(tmp_path / "model", said, packers.int8)
    for recipe in RECIPES:
        with raises_code("weights.packed_values", ModelFormatError):
            load(folder, recipe)


@for_each("point", [8, -9, -128])
def test_load_int4_zero_points_beyond_4_bits_are_refused(point: int, tmp_path: Path) -> None:
    def make(rng: np.random.Generator, num_rows: int, num_columns: int) -> packers.Packed:
        made = packers.int8(rng, num_rows, num_columns, sym=False)
        codes, points = made.tensors[".weight"] >> 4, made.tensors[".weight_zero_point"] // 4
        return made._replace(tensors=made.tensors | {".weight": codes, ".weight_zero_point": points})

    said = packed_settings.compressed("int-quantized", packed_settings.integers(-1, 4, sym=False))
    folder = make_packed(tmp_path / str(point), said, make)
    for recipe in RECIPES:
        load(folder, recipe)
    rewrite(folder, changed(".weight_zero_point", lambda t: t.index_fill(0, torch.tensor([5]), point)))
    for recipe in RECIPES:
        with raises_code("weights.packed_values", ModelFormatError, tensor=f"{MODULE}.weight_zero_point"):
            load(folder, recipe)


def test_load_kept_order_that_no_setting_declares_is_refused(tmp_path: Path) -> None:
    """Planes follow from headers. Expanded weights take any order."""
    for name, (said, make) in {
        "gptq": (packed_settings.gptq(32), MODELS["gptq"][1]),
        "compressed": (
            packed_settings.compressed("pack-quantized", packed_settings.integers(32)),
            lambda rng, rows, columns: packers.packed_int(rng, rows, columns, 32, order=True),
        ),
    }.items():
        folder = make_packed(tmp_path / name, said, make)
        load(folder)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(execute, "Arena", None)
            with raises_code("weights.packed_format", UnsupportedModelError) as caught:
                load(folder, KEPT)
        assert "packed_weights=expanded" in str(caught.value)


@for_each(
    "change, code",
    [
        (lambda tensors: tensors.__delitem__(f"{MODULE}.scales"), "weights.packed_missing"),
        (changed(".scales", lambda t: t.T), "weights.wrong_shape"),
        (changed(".qweight", lambda t: t.to(torch.int64)), "model.mismatch"),
    ],
)
def test_open_declared_weights_that_do_not_fit_are_refused(
    change: Callable[[Tensors], None], code: str, tmp_path: Path
) -> None:
    """A plan does not say YES to what cannot be loaded. It needs no weights, though."""
    folder = make_packed(tmp_path / code / "model", *MODELS["awq"])
    rewrite(folder, change)
    with raises_code(code):
        open_declared(str(folder))
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert open_declared(str(folder)).notes
    weights.unlink()
    assert open_declared(str(folder)).notes


@for_each("kind", MODELS)
def test_open_directory_settings_of_another_format_are_refused(kind: str, tmp_path: Path) -> None:
    """Neither the settings nor the tensors are believed alone."""
    folder = make_packed(tmp_path / kind, *MODELS[kind])
    for other, (said, _) in MODELS.items():
        if other == kind or {other, kind} == {"gptq", "gptq-8bit"}:
            continue
        with_settings(folder, said)
        with raises_code_in("model.mismatch", "weights.wrong_shape", "weights.packed_missing", "weights.packed_format",
                            "weights.unsupported_dtype"):  # fmt: skip
            open_directory(folder)
    with_settings(folder, None)
    with raises_code_in("model.mismatch", "weights.unsupported_dtype", "weights.unexpected_tensors"):
        load(folder)


@for_each("kind", MODELS)
def test_open_directory_packed_settings_of_plain_weights_are_refused(kind: str, tmp_path: Path) -> None:
    said, _ = MODELS[kind]
    folder = make_packed(tmp_path / kind, *MODELS[kind], plain=("model",))
    with_settings(folder, said)
    with raises_code("model.mismatch", ModelFormatError) as caught:
        open_directory(folder)
    assert "no tensor is stored so" in str(caught.value)


@for_each(
    "said, make, sizes, reason",
    [
        (packed_settings.awq(48), lambda rng, rows, columns: packers.awq(rng, rows, columns, 48), {}, "groups of 48"),
        (
            packed_settings.compressed("pack-quantized", packed_settings.integers(48)),
            lambda rng, rows, columns: packers.packed_int(rng, rows, columns, 48),
            {},
            "groups of 48",
        ),
        (
            packed_settings.gptq(32),
            lambda rng, rows, columns: packers.gptq(rng, rows, columns, 32),
            {"intermediate_size": 108},
            "do not fill words of 8 codes",
        ),
    ],
)
def test_open_directory_groups_that_do_not_divide_are_refused(said, make, sizes, reason: str, tmp_path: Path) -> None:
    folder = make_packed(tmp_path / reason.replace(" ", "-") / said["quant_method"], said, make, **sizes)
    with raises_code("weights.packed_format", UnsupportedModelError) as caught:
        open_directory(folder)
    assert reason in str(caught.value)


@for_each("suffix", [".weight.quant_state.bitsandbytes__nf4", ".trellis", ".q_weight"])
def test_open_directory_formats_without_settings_are_refused_by_name(suffix: str, tmp_path: Path) -> None:
    folder = make_packed(tmp_path / suffix, *MODELS["awq"], plain=("model",))
    with_settings(folder, None)
    rewrite(folder, added(suffix, torch.zeros(3)))
    with raises_code("weights.packed_format", UnsupportedModelError) as caught:
        open_directory(folder)
    assert "not read; take" in str(caught.value)


def test_load_short_last_group_of_gptq_is_read(tmp_path: Path) -> None:
    make = lambda rng, rows, columns: packers.gptq(rng, rows, columns, 48, order=True)  # noqa: E731
    load(make_packed(tmp_path / "model", packed_settings.gptq(48, order=True), make, **MOE))


def test_open_directory_truncated_packed_file_is_refused(tmp_path: Path) -> None:
    folder = make_packed(tmp_path / "model", *MODELS["awq"])
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])
    with raises_code("weights.truncated", ModelFormatError):
        open_directory(folder)


def test_packers_make_the_known_words() -> None:
    """The words of the layouts' description: 0x76543210 holds 0 to 7, in AWQ the columns 0, 4, 1, 5, 2, 6, 3, 7."""
    assert packers.words(np.arange(8), 4).tolist() == [0x76543210]
    assert packers.words(np.array(packers.AWQ_ORDER), 4).tolist() == [0x75316420]
