"""Saved weights as a source: every byte as it was saved, and whatever is damaged or exchanged is refused."""

import json
import os
import random
from bisect import bisect_right
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import accumulate
from math import prod
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from error_codes import raises_code
from for_each import for_each
from holdfast.distributed.mesh import Mesh
from holdfast.errors import ConfigError, ModelError, ModelFormatError
from holdfast.loading.execution.execute import load_weights
from holdfast.loading.planning.plan import CHUNK_BYTES, CPU_CHUNK_BYTES, plan_load
from holdfast.loading.quantized.source import has_saved_weights, open_quantized, plan_from_cache, plan_quantized
from holdfast.loading.quantized.writer import remove_whole, save_quantized
from holdfast.loading.sources.files import MANIFEST_FILE
from holdfast.loading.sources.source import TensorEntry
from holdfast.memory.ledger import Ledger
from holdfast.models.parameters import Parameter, Part
from holdfast.quant.weight_schemes import FP8, FP8_BLOCK, INT8, WEIGHT_SCHEMES, WeightRecipe
from loading.saved_weights import PARAMETERS, bits, loaded, plan_of, planes_of, read_all, write_model
from loading.smaller_chunks import chunks_of

FILE = "model-00001.safetensors"
EXPERTS = "layers.0.experts.weight"


@pytest.fixture
def model(tmp_path):
    return write_model(tmp_path / "m")


@pytest.fixture
def saved(tmp_path, model):
    """A folder of saved weights, and what is in it."""
    plan = plan_of(model)
    weights = loaded(plan)
    save_quantized(tmp_path / "out", model, plan, weights)
    return tmp_path / "out", plan, {name: bits(plane) for name, plane in planes_of(plan, weights).items()}


@for_each("max_bytes", [1, 999, 262_144, 300_000, 10**9])
def test_quantized_source_any_chunk_size_gives_the_same_bytes(saved, max_bytes):
    folder, plan, expected = saved
    assert has_saved_weights(folder)
    source = open_quantized(folder)
    again = plan_from_cache(plan, source)
    assert (again.weights, again.specs, again.tied, again.recipe) == (plan.weights, plan.specs, (), plan.recipe)
    assert again.reader_bytes == source.scratch_bytes_per_reader == 0
    assert not source.ignorable
    small = tuple(move for move in again.moves if move.num_bytes <= 1000 * max_bytes)
    results = read_all(source, replace(again, moves=small), max_bytes)
    assert results == {move.target: expected[move.target] for move in small}
    source.close()
    source.close()


def test_quantized_source_is_thread_safe(saved):
    folder, _, expected = saved
    source = open_quantized(folder)

    def read(seed: int) -> bool:
        draw = random.Random(seed)
        start = draw.randrange(4096)
        end = draw.randrange(start, 4097)
        out = bytearray((end - start) * 256)
        source.read_into(EXPERTS, start, end, memoryview(out))
        return out == expected[EXPERTS][start * 256 : end * 256]

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(read, range(60)))
    source.close()


def flip(path: Path, place: int) -> None:
    """One bit, with the times of the file as they were."""
    status = path.stat()
    with open(path, "r+b") as file:
        file.seek(place)
        (byte,) = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ 1]))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@for_each("max_bytes", [70_000, 10**9])
@for_each("seed", range(4))
def test_load_one_changed_bit_is_found_anywhere(saved, max_bytes, seed):
    folder, plan, expected = saved
    source = open_quantized(folder)
    draw = random.Random(seed)
    header = int.from_bytes((folder / FILE).read_bytes()[:8], "little") + 8
    place = {0: 0, 1: (folder / FILE).stat().st_size - header - 1}.get(seed, draw.randrange(10**6))
    flip(folder / FILE, header + place)
    ends = list(accumulate(spec.num_bytes for spec in plan.specs))
    spec = plan.specs[bisect_right(ends, place)]
    cached, ledger = plan_from_cache(plan, source), Ledger()
    with chunks_of(max_bytes):
        with raises_code("weights.damaged", ModelFormatError, tensor=spec.name):
            load_weights(cached, source, "cpu", ledger, lambda done, total: None, allow_nonfinite=True)
        assert not list(ledger)
        flip(folder / FILE, header + place)
        again = load_weights(cached, source, "cpu", ledger, lambda done, total: None, allow_nonfinite=True).weights
    assert {name: bits(plane) for name, plane in planes_of(plan, again).items()} == expected
    source.close()


def test_load_converted_planes_are_checked_as_saved(saved):
    folder, _, _ = saved
    for is_damaged in (False, True):
        source = open_quantized(folder)
        plan = plan_quantized(PARAMETERS, source, "float32")
        if is_damaged:
            header = int.from_bytes((folder / FILE).read_bytes()[:8], "little") + 8
            flip(folder / FILE, header)
            with raises_code("weights.damaged", ModelFormatError):
                load_weights(plan, source, "cpu", Ledger(), lambda done, total: None, allow_nonfinite=True)
        else:
            weights = load_weights(
                plan, source, "cpu", Ledger(), lambda done, total: None, allow_nonfinite=True
            ).weights
            embed = weights["embed.weight"]
            assert isinstance(embed, torch.Tensor)
            assert embed.dtype == torch.float32
        source.close()


def edited(folder: Path, edit) -> None:
    values = json.loads((folder / MANIFEST_FILE).read_text())
    edit(values)
    (folder / MANIFEST_FILE).write_text(json.dumps(values))


def cut(folder: Path) -> None:
    os.truncate(folder / FILE, (folder / FILE).stat().st_size - 1)


def lengthen(folder: Path) -> None:
    (folder / FILE).write_bytes((folder / FILE).read_bytes() + b"x")


def rename_in_header(folder: Path) -> None:
    (folder / FILE).write_bytes((folder / FILE).read_bytes().replace(b"embed.weight", b"embed.height", 1))


def space_in_header(folder: Path) -> None:
    data = (folder / FILE).read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    first, second = list(header)[:2]
    header[first]["dtype"] = "F16"
    text = json.dumps(header, separators=(",", ":")).encode()
    (folder / FILE).write_bytes(data[:8] + text.ljust(end - 8) + data[end:])
    assert second in header


def remove_file(folder: Path) -> None:
    (folder / FILE).unlink()


def link_out(folder: Path) -> None:
    os.rename(folder / FILE, folder.parent / "outside")
    (folder / FILE).symlink_to(folder.parent / "outside")


def pipe(folder: Path) -> None:
    (folder / FILE).unlink()
    os.mkfifo(folder / FILE)


def other_shape(folder: Path) -> None:
    edited(folder, lambda values: values["weights"][0].update(shape=[256, 96]))


def another_weight(folder: Path) -> None:
    edited(
        folder, lambda values: values["weights"].append({"name": "x", "shape": [1], "dtype": "int8", "scheme": None})
    )


def no_weight(folder: Path) -> None:
    edited(folder, lambda values: values["weights"].pop())


def twice(folder: Path) -> None:
    edited(folder, lambda values: values["weights"].append(values["weights"][0]))


def same_file_twice(folder: Path) -> None:
    edited(folder, lambda values: values["files"].append(values["files"][0]))


def scale_of_its_own(folder: Path) -> None:
    edited(folder, lambda values: values["weights"][1].update(name="lm_head.weight.scale"))


@pytest.mark.parametrize(
    ("damage", "code"),
    [
        (cut, "weights.saved_broken"),
        (lengthen, "weights.saved_broken"),
        (rename_in_header, "weights.saved_broken"),
        (space_in_header, "weights.saved_broken"),
        (remove_file, "weights.saved_broken"),
        (link_out, "file.bad_link"),
        (pipe, "file.not_regular"),
        (other_shape, "weights.saved_broken"),
        (another_weight, "weights.saved_broken"),
        (no_weight, "weights.saved_broken"),
        (twice, "weights.saved_broken"),
        (same_file_twice, "weights.saved_broken"),
        (scale_of_its_own, "weights.saved_broken"),
        (lambda folder: (folder / MANIFEST_FILE).write_text("{"), "file.not_json"),
        (lambda folder: (folder / MANIFEST_FILE).unlink(), "file.unreadable"),
    ],
)
def test_open_quantized_damaged_folder_is_refused(saved, damage, code):
    folder, _, _ = saved
    damage(folder)
    with raises_code(code, ModelError):
        open_quantized(folder)
    assert remove_whole(folder), "a folder that was refused is not locked"
    with raises_code("file.unreadable", ModelFormatError):
        open_quantized(folder)


def test_load_file_cut_after_opening_is_refused(saved):
    folder, plan, _ = saved
    source = open_quantized(folder)
    cut(folder)
    with raises_code("file.changed", ModelFormatError):
        read_all(source, plan_from_cache(plan, source), 10**6)
    source.close()


def test_open_declared_unreadable_file_is_refused(saved, monkeypatch):
    folder, _, _ = saved

    def refuse(*arguments: object, **options: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("holdfast.loading.quantized.source.has_file", refuse)
    with raises_code("file.unreadable", ModelFormatError):
        open_quantized(folder)
    monkeypatch.undo()
    monkeypatch.setattr(os, "preadv", refuse)
    with raises_code("file.unreadable", ModelFormatError):
        open_quantized(folder)
    monkeypatch.undo()
    assert remove_whole(folder)


def test_remove_whole_keeps_a_folder_that_is_open(saved):
    folder, _, _ = saved
    source = open_quantized(folder)
    assert not remove_whole(folder)
    source.close()
    other = open_quantized(folder)
    del other
    assert remove_whole(folder)


def test_plan_from_cache_other_weights_are_refused(saved, model):
    folder, plan, _ = saved
    source = open_quantized(folder)
    for other in (WeightRecipe(INT8), WeightRecipe(FP8, "none"), WeightRecipe(FP8_BLOCK), WeightRecipe()):
        with raises_code("weights.saved_broken", ModelFormatError):
            plan_from_cache(plan_of(model, other), source)
    with raises_code("weights.saved_broken", ModelFormatError):
        plan_from_cache(plan_of(model, dtype="float16"), source)
    with raises_code("weights.saved_broken", ModelFormatError):
        plan_from_cache(replace(plan, weights=plan.weights[:-1]), source)
    source.close()


def test_plan_quantized_takes_schemes_from_the_manifest(saved):
    folder, plan, _ = saved
    source = open_quantized(folder)
    again = plan_quantized(PARAMETERS, source, "float16", WeightRecipe(FP8))
    assert [weight.scheme for weight in again.weights] == [weight.scheme for weight in plan.weights]
    assert {spec.dtype for spec in again.specs} == {"float16", "float32", "float8_e4m3fn", "int8"}
    assert {move.tensor_dtype for move in again.moves} == {"bfloat16", "float32", "float8_e4m3fn", "int8"}
    assert again.recipe == WeightRecipe(FP8, "head", ("embed.weight",))
    for parameter, weight in zip(PARAMETERS, again.weights, strict=True):
        assert (again.recipe.scheme_for(parameter.kind, (parameter.name,)) is None) == (weight.scheme is None)
    source.close()


def test_plan_quantized_other_model_is_refused(saved):
    folder, _, _ = saved
    source = open_quantized(folder)
    with raises_code("weights.saved_otherwise", ConfigError):
        plan_quantized(PARAMETERS, source, "bfloat16", WeightRecipe(INT8))
    with raises_code("weights.other_rank", ConfigError):
        plan_quantized(PARAMETERS, source, "bfloat16", mesh=Mesh(1, 2))
    with raises_code("weights.saved_broken", ModelFormatError):
        plan_quantized(PARAMETERS[:-1], source, "bfloat16")
    with raises_code("weights.saved_broken", ModelFormatError):
        plan_quantized((*PARAMETERS, Parameter("more", (1,), (Part("m", 0, (1,)),))), source, "bfloat16")
    norm = replace(PARAMETERS[1], shape=(128,))
    with raises_code("weights.saved_broken", ModelFormatError):
        plan_quantized((PARAMETERS[0], norm, *PARAMETERS[2:]), source, "bfloat16")
    router = replace(PARAMETERS[4], dtype=None)
    with raises_code("weights.saved_broken", ModelFormatError):
        plan_quantized((*PARAMETERS[:4], router, *PARAMETERS[5:]), source, "bfloat16")
    odd = replace(PARAMETERS[5], kind="router")
    with raises_code("weights.saved_broken", ModelFormatError):
        plan_quantized((*PARAMETERS[:5], odd, PARAMETERS[6]), source, "bfloat16")
    source.close()


def test_plan_quantized_head_with_codes_by_block_is_refused(tmp_path, model):
    plan = plan_of(model, WeightRecipe(FP8_BLOCK))
    save_quantized(tmp_path / "out", model, plan, loaded(plan))
    source = open_quantized(tmp_path / "out")
    odd = replace(PARAMETERS[5], kind="head")
    with raises_code("weights.saved_broken", ModelFormatError):
        plan_quantized((*PARAMETERS[:5], odd, PARAMETERS[6]), source, "bfloat16")
    source.close()


def layer_of(hidden: int, wide: int, vocab: int) -> list[Parameter]:
    """A decoder layer, an embedding that is the head too, and norms, in the proportions of a model of this size."""
    shapes = {
        "qkv.weight": (hidden + hidden // 2, hidden),
        "o.weight": (hidden, hidden),
        "gate_up.weight": (2 * wide, hidden),
        "down.weight": (hidden, wide),
    }
    linear = [Parameter(name, shape, (Part(name, 0, shape),)) for name, shape in shapes.items()]
    norms = [Parameter(name, (hidden,), (Part(name, 0, (hidden,)),), "norm") for name in ("norm1", "norm2")]
    return [*linear, *norms, Parameter("embed.weight", (vocab, hidden), (Part("embed", 0, (vocab, hidden)),), "head")]


@pytest.mark.parametrize("max_bytes", [CPU_CHUNK_BYTES, CHUNK_BYTES])
def test_quantized_source_reads_little_over_half_of_bf16(tmp_path, model, monkeypatch, max_bytes):
    """Bytes that are read, headers and manifest included, against the bf16 that the first start reads."""
    parameters = layer_of(512, 1408, 4500)
    entries = {
        part.tensor: TensorEntry(part.tensor, "bfloat16", part.shape, "m.safetensors", 2 * prod(part.shape))
        for parameter in parameters
        for part in parameter.parts
    }
    headers = SimpleNamespace(entries=entries, ignorable=frozenset(), scratch_bytes_per_reader=0)
    ratios = {}
    for scheme in WEIGHT_SCHEMES.values():
        plan = plan_load(parameters, headers, "bfloat16", WeightRecipe(scheme))  # type: ignore[arg-type]
        folder = tmp_path / scheme.name
        save_quantized(folder, model, plan, loaded(plan))
        num_read, preadv = [(folder / MANIFEST_FILE).stat().st_size], os.preadv

        def counted(descriptor, buffers, offset, preadv=preadv, num_read=num_read):
            num_read.append(preadv(descriptor, buffers, offset))
            return num_read[-1]

        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", counted)
            source = open_quantized(folder)
            read_all(source, plan_from_cache(plan, source), max_bytes)
            source.close()
        assert sum(num_read) > sum(spec.num_bytes for spec in plan.specs)
        ratios[scheme.name] = sum(num_read) / plan.read_bytes
    assert max(ratios[name] for name in ("fp8", "fp8_tensor", "fp8_block", "int8")) < 0.55
    assert ratios["mxfp4"] < 0.45
