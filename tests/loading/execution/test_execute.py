"""Loads: every scheme, layout and cut gives the same bytes, and whatever stops one leaves nothing behind."""

import logging
import random
import signal
import threading
import time
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from error_codes import raises_code
from for_each import for_each
from holdfast.errors import MemoryPlanError, ModelFormatError
from holdfast.loading.execution import execute
from holdfast.loading.execution.execute import LoadReport, load_weights
from holdfast.loading.model_files import open_directory
from holdfast.loading.planning.plan import plan_load
from holdfast.loading.sources import dummy
from holdfast.loading.sources.dummy import DummySource
from holdfast.loading.sources.safetensors import SafetensorsFile, SafetensorsSource
from holdfast.loading.sources.source import read_rows
from holdfast.memory import arena
from holdfast.memory.arena import UNWRITTEN
from holdfast.memory.ledger import Ledger
from holdfast.models.parameters import Parameter, Part
from holdfast.quant.weight_schemes import AS_STORED, INT8, WEIGHT_SCHEMES, WeightRecipe
from loading.mixed_model import bits, parameters_for, planes_of, tensors_for, uprights, wanted_planes
from loading.smaller_chunks import chunks_of
from loading.tensor_source import TIED, UNTIED, TensorSource
from loading.tiny_models import FAMILIES, save_tiny
from scratch_memory import Poison

REPORT = LoadReport(
    seconds=2.0,
    read_bytes=30 * 10**9,
    read_seconds=9.5,
    num_readers=8,
    copy_seconds=0.75,
    place_seconds=0.25,
    final_bytes=15 * 10**9,
    staging_bytes=32 * 2**20,
    pinned_bytes=192 * 2**20,
    peak_allocated_bytes=None,
    peak_reserved_bytes=None,
    device_used_bytes=None,
    peak_anonymous_bytes=None,
)


def test_load_report_gives_bytes_per_second_and_a_summary():
    assert REPORT.bytes_per_second == 15e9
    assert (
        REPORT.summary == "30.00 GB in 2.00 s, 15.0 GB/s; reading 9.50 s in 8 threads; copying 0.75 s; placing 0.25 s"
    )


def test_load_report_of_an_empty_load_divides_by_no_zero():
    empty = replace(REPORT, seconds=0.0, read_bytes=0, num_readers=0, copy_seconds=0.0, place_seconds=0.0)
    assert empty.bytes_per_second == 0
    assert empty.summary == "0.00 GB in 0.00 s, 0.0 GB/s; placing 0.00 s"


RECIPES = {"none": AS_STORED} | {name: WeightRecipe(scheme, "all") for name, scheme in WEIGHT_SCHEMES.items()}


def silent(done, total):
    pass


def random_tensors(parameters, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {part.tensor: torch.randn(part.shape, generator=generator) for p in parameters for part in p.parts}


def load(
    parameters,
    source,
    dtype="float32",
    ledger=None,
    on_progress=silent,
    recipe=AS_STORED,
    chunk_bytes=None,
    allow_nonfinite=False,
):
    plan = plan_load(parameters, source, dtype, recipe)
    with chunks_of(chunk_bytes):
        return load_weights(plan, source, "cpu", ledger or Ledger(), on_progress, allow_nonfinite).weights


def watch_arenas(monkeypatch):
    """References to every block of memory that arenas take from now on; they hold as long as any view does."""
    made: list[weakref.ref] = []
    allocate = arena.allocate_bytes

    def watched(*args):
        block = allocate(*args)
        made.append(weakref.ref(block.untyped_storage()))
        return block

    monkeypatch.setattr(arena, "allocate_bytes", watched)
    return made


def expected(parameter, state):
    return torch.cat([state[part.tensor] for part in parameter.parts])


@pytest.mark.each_pair
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("layout", ["apart", "fused", "transposed"])
@pytest.mark.parametrize("chunk_bytes", [5000, None])
@pytest.mark.usefixtures("poison")
def test_load_weights_every_scheme_gives_its_defined_bytes(recipe, layout, chunk_bytes):
    values, parameters = uprights(), parameters_for(layout)
    source = TensorSource(tensors=tensors_for(parameters, values))
    plan = plan_load(parameters, source, "bfloat16", RECIPES[recipe])
    loaded = load(parameters, source, "bfloat16", recipe=RECIPES[recipe], chunk_bytes=chunk_bytes)
    assert list(loaded) == [weight.name for weight in plan.weights]
    for weight, parameter in zip(plan.weights, parameters, strict=True):
        planes = planes_of(loaded[weight.name])
        for plane, spec, wanted in zip(planes, weight.specs, wanted_planes(weight, parameter, values), strict=True):
            assert plane.shape == spec.shape
            assert torch.equal(bits(plane), bits(wanted)), spec.name
    assert (plan.num_quantized > 0) == (recipe != "none")


@for_each("recipe", ["none", "fp8_tensor", "fp8_block"])
@for_each("seed", [0, 1])
def test_load_result_is_independent_of_tensor_order_and_files(recipe, seed, tmp_path):
    from safetensors.torch import save_file

    values, parameters = uprights(), parameters_for("apart")
    tensors = tensors_for(parameters, values)
    names = sorted(tensors)
    random.Random(seed).shuffle(names)
    for index in range(3):
        save_file({name: tensors[name] for name in names[index::3]}, tmp_path / f"{index}.safetensors")
    source = SafetensorsSource([SafetensorsFile(tmp_path / f"{index}.safetensors") for index in (2, 0, 1)])
    shuffled = load(parameters, source, "float16", recipe=RECIPES[recipe], chunk_bytes=5000)
    plain = load(parameters, TensorSource(tensors=tensors), "float16", recipe=RECIPES[recipe])
    for name, weight in plain.items():
        for ours, theirs in zip(planes_of(shuffled[name]), planes_of(weight), strict=True):
            assert torch.equal(bits(ours), bits(theirs)), name
    source.close()


@pytest.mark.each_value
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("chunk_bytes", [4000, None])
def test_load_share_of_rows_or_columns_matches_a_slice(recipe, chunk_bytes):
    tensor = torch.randn(512, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    source = TensorSource(tensors={"t": tensor})
    whole = Parameter("w", (512, 256), (Part("t", 0, (512, 256)),))
    rows = Parameter("w", (256, 256), (Part("t", 0, (512, 256), (128, 384), whole_rows=(0, 512)),), whole=whole)
    columns = Parameter("w", (512, 128), (Part("t", 0, (512, 256), columns=(128, 256)),), whole=whole)
    planes = planes_of(load([whole], source, "bfloat16", recipe=RECIPES[recipe])["w"])
    by_rows = planes_of(load([rows], source, "bfloat16", recipe=RECIPES[recipe], chunk_bytes=chunk_bytes)["w"])
    by_columns = planes_of(load([columns], source, "bfloat16", recipe=RECIPES[recipe], chunk_bytes=chunk_bytes)["w"])
    for plane, of_rows, of_columns in zip(planes, by_rows, by_columns, strict=True):
        assert torch.equal(bits(of_rows), bits(plane[len(plane) // 4 : 3 * len(plane) // 4]))
        half = plane if plane.ndim == 1 else plane[:, plane.shape[1] // 2 :]
        assert torch.equal(bits(of_columns), bits(half))


@pytest.mark.parametrize("chunk_bytes", [256, None])
def test_load_scale_of_several_rows_is_repeated(chunk_bytes):
    scale = Parameter("w.scale", (6, 3), (Part("a", 0, (1, 3), repeats=2), Part("b", 2, (2, 3), repeats=2)))
    source = TensorSource(tensors={"a": torch.randn(1, 3), "b": torch.randn(2, 3)})
    weights = load([scale], source, chunk_bytes=chunk_bytes)
    wanted = torch.cat([source.tensors["a"], source.tensors["b"]]).repeat_interleave(2, 0)
    assert torch.equal(weights["w.scale"], wanted)


@pytest.mark.each_value
@pytest.mark.parametrize("max_shard_size", ["1GB", "50KB"])
@pytest.mark.parametrize("family", FAMILIES)
def test_load_tiny_model_of_each_family_is_bit_exact(family, max_shard_size, tmp_path):
    model = save_tiny(family, tmp_path, max_shard_size=max_shard_size)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (max_shard_size == "50KB")
    opened = open_directory(tmp_path)
    ledger = Ledger()
    weights = load(opened.parameters, opened.source, ledger=ledger, chunk_bytes=3072)
    state = model.state_dict()
    assert set(weights) == {parameter.name for parameter in opened.parameters}
    for parameter in opened.parameters:
        if not all(part.tensor in state for part in parameter.parts):
            continue  # stored in another layout, which tests of layouts look at
        wanted = expected(parameter, state).view(parameter.shape)
        assert torch.equal(bits(weights[parameter.name]), bits(wanted)), parameter.name
    assert ledger.total_bytes == plan_load(opened.parameters, opened.source, "float32").final_bytes
    opened.source.close()


@pytest.mark.each_value
@pytest.mark.parametrize("stored", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("final", ["float32", "float16", "bfloat16"])
def test_load_converts_dtypes_as_torch_does(stored, final, tmp_path):
    model = save_tiny("qwen2", tmp_path, dtype=stored)
    opened = open_directory(Path(tmp_path))
    assert opened.spec.checkpoint_dtype == stored
    weights = load(opened.parameters, opened.source, final)
    for parameter in opened.parameters:
        wanted = expected(parameter, model.state_dict()).to(getattr(torch, final))
        assert torch.equal(bits(weights[parameter.name]), bits(wanted)), parameter.name
    opened.source.close()


@for_each("recipe", ["none", "fp8"])
@for_each("dummy", [False, True])
def test_load_weights_fills_one_allocation_of_planned_size(recipe, dummy):
    odd = Parameter("odd.bias", (77,), (Part("odd.bias", 0, (77,)),), "bias")
    wide = Parameter("wide.weight", (5, 129), (Part("wide.weight", 0, (5, 129)),))
    parameters = (odd, *UNTIED, wide)
    source = DummySource(parameters, "float16") if dummy else TensorSource(tensors=random_tensors(parameters))
    plan = plan_load(parameters, source, "bfloat16", RECIPES[recipe])
    ledger = Ledger()
    weights = load_weights(plan, source, "cpu", ledger, silent).weights
    assert list(weights) == [parameter.name for parameter in parameters]
    tensors = [plane for weight in weights.values() for plane in planes_of(weight)]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    assert list(storages.values()) == [plan.final_bytes]
    assert all(tensor.data_ptr() % 256 == 0 for tensor in tensors)
    assert all(tensor.is_contiguous() for tensor in tensors)
    assert ledger.total_bytes == plan.final_bytes == sum(spec.aligned_bytes for spec in plan.specs)
    assert ledger.group_bytes() == {"weights": plan.final_bytes}, "staging is given back"
    assert {line.owner for line in ledger} == {f"weights/{spec.name}" for spec in plan.specs}
    if recipe == "none":
        for parameter in parameters:
            parts = [read_rows(source, part.tensor, 0, part.source_rows) for part in parameter.parts]
            assert torch.equal(weights[parameter.name], torch.cat(parts).bfloat16()), parameter.name


@pytest.mark.parametrize("dummy", [False, True], ids=["read", "written"])
def test_load_weights_staging_is_in_the_ledger_during_the_load(dummy):
    source = DummySource(UNTIED, "bfloat16") if dummy else TensorSource(tensors=random_tensors(UNTIED))
    plan = plan_load(UNTIED, source, "bfloat16")
    ledger, groups = Ledger(), []
    load_weights(plan, source, "cpu", ledger, lambda done, total: groups.append(ledger.group_bytes()))
    assert len(groups) >= 2
    assert all(group == {"weights": plan.final_bytes, "staging": plan.staging_bytes("cpu")} for group in groups)


@pytest.mark.each_value
@pytest.mark.parametrize("recipe", ["none", "fp8_tensor", "mxfp4"])
@pytest.mark.parametrize("chunk_bytes", [512, None])
def test_load_from_a_writing_source_matches_reading(recipe, chunk_bytes, monkeypatch):
    parameters = tuple(parameter for parameter in parameters_for("apart") if parameter.kind != "router")
    source = DummySource(parameters, "bfloat16")
    stored = {name: read_rows(source, name, 0, entry.shape[0]) for name, entry in source.entries.items()}
    wanted = load(parameters, TensorSource(tensors=stored), "bfloat16", recipe=RECIPES[recipe])
    monkeypatch.setattr(source, "read_into", None)
    weights = load(parameters, source, "bfloat16", recipe=RECIPES[recipe], chunk_bytes=chunk_bytes)
    for name, weight in wanted.items():
        for ours, theirs in zip(planes_of(weights[name]), planes_of(weight), strict=True):
            assert torch.equal(bits(ours), bits(theirs)), name


@pytest.mark.parametrize("seconds", [0.0, 100.0])
def test_load_progress_rises_to_total_at_a_bounded_rate(seconds, monkeypatch):
    source = TensorSource(tensors=random_tensors(UNTIED))
    tied = source.tensors | {"lm_head.weight": source.tensors["model.embed_tokens.weight"]}
    monkeypatch.setattr(execute, "SECONDS_BETWEEN_PROGRESS", seconds)
    seen = []
    load(TIED, TensorSource(tensors=tied), on_progress=lambda done, total: seen.append((done, total)), chunk_bytes=32)
    assert seen[0][0] == 0
    assert seen[-1][0] == seen[-1][1] == sum(tensor.nbytes for tensor in tied.values())
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert len({total for _, total in seen}) == 1
    assert len(seen) == 2 if seconds else len(seen) > 10


def test_load_report_holds_planned_bytes_and_times():
    source = TensorSource(tensors=random_tensors(UNTIED))
    plan = plan_load(UNTIED, source, "bfloat16")
    report = load_weights(plan, source, "cpu", Ledger(), silent).report
    assert (report.read_bytes, report.final_bytes) == (plan.read_bytes, plan.final_bytes)
    assert report.staging_bytes == plan.staging_bytes("cpu")
    assert report.num_readers >= 1
    assert report.read_seconds > 0 < report.place_seconds
    assert report.seconds >= report.place_seconds
    assert report.peak_allocated_bytes is None


@for_each("final", ["float32", "bfloat16"])
@for_each("recipe", [AS_STORED, WeightRecipe(INT8, "all")])
def test_load_tied_head_equal_to_the_embedding_loads_once(final, recipe):
    tensors = random_tensors(TIED)
    tensors["model.embed_tokens.weight"][3, 1] = float("nan")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    weights = load(TIED, TensorSource(tensors=tensors), final, recipe=recipe, allow_nonfinite=True)
    assert set(weights) == {"embed.weight", "layers.0.qkv.weight"}


@for_each("row", [0, 7, 9])
@for_each("chunk_bytes", [64, None])
def test_load_tied_head_that_differs_raises_and_frees_all(row, chunk_bytes):
    tensors = random_tensors(TIED)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["lm_head.weight"][row, 2] += 1
    ledger = Ledger()
    with raises_code("weights.not_tied", ModelFormatError):
        load(TIED, TensorSource(tensors=tensors), ledger=ledger, chunk_bytes=chunk_bytes)
    assert list(ledger) == []


@pytest.mark.each_pair
@pytest.mark.parametrize("recipe", ["none", "fp8", "fp8_block", "fp8_tensor", "int8"])
@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
@pytest.mark.parametrize("chunk_bytes", [600, None])
def test_load_nonfinite_numbers_are_refused_by_tensor_and_row(recipe, bad, chunk_bytes, monkeypatch, caplog):
    made = watch_arenas(monkeypatch)
    tensor = torch.randn(300, 128).bfloat16()
    tensor[[217, 250], 5] = bad
    parameter = Parameter("w", (200, 128), (Part("t", 0, (300, 128), rows=(100, 300)),))
    source = TensorSource(tensors={"t": tensor})
    ledger = Ledger()
    with raises_code("weights.not_finite", ModelFormatError):
        load([parameter], source, "bfloat16", ledger, recipe=RECIPES[recipe], chunk_bytes=chunk_bytes)
    assert list(ledger) == []
    assert all(reference() is None for reference in made)
    with caplog.at_level(logging.WARNING, logger="holdfast"):
        load([parameter], source, "bfloat16", ledger, recipe=RECIPES[recipe], allow_nonfinite=True)
    assert "'t' is not finite in row 217" in caplog.text


@pytest.mark.parametrize(("num_bad", "others"), [(1, ""), (2, ", nor 1 more tensor"), (3, ", nor 2 more tensors")])
def test_load_counts_nonfinite_tensors_not_moves(num_bad, others):
    names = "abc"[:num_bad]
    tensors = {name: torch.full((4, 8), float("nan")) for name in names}
    halves = [Part(name, row, (4, 8), rows=(row, row + 2)) for name in names for row in (0, 2)]
    parameters = [Parameter(f"w{place}", (2, 8), (half._replace(row_start=0),)) for place, half in enumerate(halves)]
    with raises_code("weights.not_finite", ModelFormatError, others=others):
        load(parameters, TensorSource(tensors=tensors), "bfloat16")


@pytest.mark.each_value
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, ModelFormatError("file.changed", file="m")])
@pytest.mark.parametrize("at", [0, 1, 4])
@pytest.mark.parametrize("dummy", [False, True], ids=["read", "written"])
def test_load_stopped_by_an_error_leaks_no_arena_or_thread(error, at, dummy, monkeypatch):
    monkeypatch.setattr(execute, "SECONDS_BETWEEN_PROGRESS", 0.0)
    made = watch_arenas(monkeypatch)
    calls, threads = 0, threading.active_count()

    def stop(done, total):
        nonlocal calls
        calls += 1
        if calls > at:
            raise error

    ledger = Ledger()
    source = DummySource(UNTIED, "float32") if dummy else TensorSource(tensors=random_tensors(UNTIED))
    with pytest.raises(error if isinstance(error, type) else ModelFormatError) as caught:
        load(UNTIED, source, ledger=ledger, on_progress=stop, chunk_bytes=64)
    assert len(made) == 2
    assert all(reference() is None for reference in made), "the error is at hand and holds no weights"
    assert list(ledger) == []
    assert threading.active_count() == threads
    del caught
    load(UNTIED, source, ledger=ledger)
    assert ledger.total_bytes == 3 * 256


@for_each("fails", ["read", "write", "place"])
@for_each("error", [ModelFormatError("file.changed", file="m"), KeyboardInterrupt()])
def test_load_failed_in_read_write_or_place_frees_all(fails, error, monkeypatch):
    """In a reader's thread or in ours: frames that failed have rows of the arenas as arguments, and the error keeps frames."""
    made = watch_arenas(monkeypatch)
    threads = threading.active_count()

    def fail(*args, **kwargs):
        raise error

    source = TensorSource(tensors=random_tensors(UNTIED))
    if fails == "read":
        source = TensorSource(tensors=source.tensors, on_read=lambda name, start, end: name == "v" and fail())
    elif fails == "write":
        source = DummySource(UNTIED, "float32")
        monkeypatch.setattr(dummy, "_repeat", fail)
    else:
        monkeypatch.setattr("holdfast.loading.execution.place.place_plain", fail)
    ledger = Ledger()
    with pytest.raises(type(error)):
        load(UNTIED, source, ledger=ledger, chunk_bytes=64)
    assert len(made) == 2
    assert all(reference() is None for reference in made)
    assert list(ledger) == []
    assert threading.active_count() == threads


def test_load_ctrl_c_while_waiting_for_a_reader_ends_it(monkeypatch):
    made = watch_arenas(monkeypatch)
    threads = threading.active_count()

    def interrupt(name, start, end):
        if name == "k":
            time.sleep(0.05)  # the other thread has nothing to do by now
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            time.sleep(0.2)

    ledger = Ledger()
    with pytest.raises(KeyboardInterrupt):
        load(UNTIED, TensorSource(tensors=random_tensors(UNTIED), on_read=interrupt), ledger=ledger, chunk_bytes=64)
    assert all(reference() is None for reference in made)
    assert list(ledger) == []
    assert threading.active_count() == threads


def test_watch_arenas_sees_an_arena_while_a_weight_lives(monkeypatch):
    """Or the tests above would find nothing left behind whatever was."""
    made = watch_arenas(monkeypatch)
    weights = load(UNTIED, TensorSource(tensors=random_tensors(UNTIED)))
    one = weights.pop("embed.weight")
    assert [reference() is not None for reference in made] == [True, False]
    del weights, one
    assert [reference() is not None for reference in made] == [False, False]


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("poison", [Poison.NAN], indirect=True)
def test_load_weights_overwrites_every_poisoned_byte():
    """Without the last move its rows would still be poison: what a hole looks like."""
    source = TensorSource(tensors=random_tensors(UNTIED))
    plan = plan_load(UNTIED, source, "bfloat16")
    whole = load_weights(plan, source, "cpu", Ledger(), silent).weights
    assert not any((bits(tensor) == UNWRITTEN).all() for tensor in whole.values())
    holed = load_weights(replace(plan, moves=plan.moves[:-1]), source, "cpu", Ledger(), silent).weights
    target = plan.moves[-1].target
    assert (bits(holed[target][-plan.moves[-1].num_source_rows :]) == UNWRITTEN).all()


@for_each("failing", [1, 2])
@for_each(
    "error",
    [torch.OutOfMemoryError("no"), RuntimeError("can't allocate memory"), RuntimeError("CUDA error: out of memory")],
)
def test_load_out_of_memory_is_refused_with_sizes(failing, error, monkeypatch):
    allocate = arena.allocate_bytes
    num_calls = 0

    def refuse(*args):
        nonlocal num_calls
        num_calls += 1
        if num_calls == failing:
            raise error
        return allocate(*args)

    monkeypatch.setattr(arena, "allocate_bytes", refuse)
    ledger = Ledger()
    what = {1: "as much in one piece", 2: "the staging to load them through"}[failing]
    with raises_code("weights.no_memory", MemoryPlanError, what=what):
        load(UNTIED, DummySource(UNTIED, "float32"), ledger=ledger)
    assert list(ledger) == []


def test_load_other_allocation_error_is_not_out_of_memory(monkeypatch):
    def refuse(*args, **kwargs):
        raise RuntimeError("Found no NVIDIA driver on your system")

    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(RuntimeError, match="driver"):
        load(UNTIED, TensorSource(tensors=random_tensors(UNTIED)))
