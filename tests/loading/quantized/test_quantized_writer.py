"""Saving quantized weights: whole folders or none, under locks, that other packages can read."""

import errno
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from io import FileIO
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open

from error_codes import raises_code
from holdfast.distributed.mesh import Mesh
from holdfast.errors import ConfigError, ModelFormatError
from holdfast.loading.quantized import writer as quantized_writer
from holdfast.loading.quantized.manifest import identify_source, read_manifest
from holdfast.loading.quantized.source import open_quantized, plan_quantized
from holdfast.loading.quantized.writer import (
    files_of,
    locked,
    plan_digest,
    refuse_saving,
    remove_whole,
    save_quantized,
    sweep,
    whole_folder,
)
from holdfast.loading.sources.dummy import DummySource
from holdfast.loading.sources.files import MANIFEST_FILE
from holdfast.memory.workspace_plan import TensorSpec
from holdfast.quant.weight_schemes import FP8, MXFP4, WeightRecipe
from loading.saved_weights import PARAMETERS, RECIPES, bits, loaded, plan_of, planes_of, read_all, write_model

WRITER = """
import sys, time
from pathlib import Path
from holdfast.loading.quantized.writer import whole_folder
with whole_folder(Path(sys.argv[1])) as partial:
    (partial / "half").write_text("half")
    print("written", flush=True)
    time.sleep(60)
"""


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_whole_folder_appears_only_when_complete(tmp_path):
    final = tmp_path / "final"
    with whole_folder(final) as partial:
        (partial / "a").write_text("1")
        assert not final.exists()
        assert partial.parent == tmp_path
    assert names(tmp_path) == ["final"]
    assert names(final) == ["a"]
    assert final.stat().st_mode & 0o777 == 0o777 & ~current_umask()


def current_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_whole_folder_replaces_an_empty_folder_not_a_full_one(tmp_path):
    final = tmp_path / "final"
    final.mkdir()
    with whole_folder(final) as partial:
        (partial / "a").write_text("1")
    with pytest.raises(FileExistsError, match="another process was faster"), whole_folder(final) as partial:
        (partial / "b").write_text("2")
    assert names(final) == ["a"]
    assert names(tmp_path) == ["final"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_whole_folder_leaves_nothing_after_an_error(tmp_path, error):
    def write() -> None:
        with whole_folder(tmp_path / "final") as partial:
            (partial / "a").write_text("1")
            raise error

    with pytest.raises(error):
        write()
    assert names(tmp_path) == []


def test_sweep_removes_the_partial_folder_of_a_killed_process(tmp_path):
    final = tmp_path / "final [1]"
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(final)], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    with writer.stdout:
        assert writer.stdout.readline() == "written\n"
        assert sweep(tmp_path, final.name), "it is being written"
        assert not sweep(tmp_path, "final"), "another name is not"
        writer.send_signal(signal.SIGKILL)
        writer.wait()
    (left,) = names(tmp_path)
    assert left.startswith(".final")
    assert not sweep(tmp_path, final.name)
    assert names(tmp_path) == []


def test_whole_folder_concurrent_writers_stay_separate(tmp_path):
    final = tmp_path / "final"
    with whole_folder(final) as first:
        (first / "a").write_text("1")
        with whole_folder(final) as second:
            assert sweep(tmp_path)
            (second / "b").write_text("2")
            assert names(first) == ["a"]
        with pytest.raises(FileExistsError), whole_folder(final) as third:
            (third / "c").write_text("3")
        os.rename(final, tmp_path / "away")
    assert names(final) == ["a"]
    assert names(tmp_path) == ["away", "final"]


def test_remove_whole_keeps_a_folder_with_readers(tmp_path):
    folder = tmp_path / "entry"
    folder.mkdir()
    (folder / "a").write_text("1")
    readers = [locked(folder, is_shared=True), locked(folder, is_shared=True)]
    assert None not in readers
    assert not remove_whole(folder)
    assert names(folder) == ["a"]
    for reader in readers:
        assert reader is not None
        os.close(reader)
    assert remove_whole(folder)
    assert names(tmp_path) == []
    assert remove_whole(folder), "it is gone already"


def test_whole_folder_swept_before_its_lock_is_made_again(tmp_path, monkeypatch):
    mkdir, made = os.mkdir, []

    def swept(path) -> None:
        mkdir(path)
        made.append(path)
        if len(made) < 3:
            assert not sweep(tmp_path)

    monkeypatch.setattr(os, "mkdir", swept)
    with whole_folder(tmp_path / "final") as partial:
        (partial / "a").write_text("1")
    assert len(made) == 3
    assert names(tmp_path / "final") == ["a"]


def test_sweep_and_remove_whole_without_locks_keep_all(tmp_path, monkeypatch):
    def refuse(*arguments: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("holdfast.loading.quantized.writer.fcntl.flock", refuse)
    with whole_folder(tmp_path / "final") as partial:
        (partial / "a").write_text("1")
        assert not sweep(tmp_path)
        assert partial.exists()
    assert names(tmp_path / "final") == ["a"]
    with pytest.raises(OSError, match="No locks available"):
        remove_whole(tmp_path / "final")
    assert names(tmp_path / "final") == ["a"]


CRASH = """
import os, signal, sys
from pathlib import Path
from holdfast.loading.quantized.writer import save_quantized
from loading.saved_weights import loaded, open_written, plan_of
folder = Path(sys.argv[1])
plan = plan_of(open_written(folder / "m"))
def stop(done, total):
    if done > total // 2:
        os.kill(os.getpid(), signal.SIGKILL)
save_quantized(folder / "out", open_written(folder / "m"), plan, loaded(plan), on_progress=stop)
"""


@pytest.fixture
def model(tmp_path):
    return write_model(tmp_path / "m")


@pytest.mark.parametrize("recipe", RECIPES)
def test_save_quantized_folder_opens_as_a_model(tmp_path, model, recipe):
    plan = plan_of(model, recipe)
    weights, folder = loaded(plan), tmp_path / "out"
    steps: list[tuple[int, int]] = []
    num_bytes = save_quantized(folder, model, plan, weights, on_progress=lambda *step: steps.append(step))
    total = sum(spec.num_bytes for spec in plan.specs)
    assert steps[-1] == (total, total)
    assert {path.name for path in folder.iterdir()} == {
        "config.json",
        "tokenizer.json",
        "chat_template.jinja",
        "model-00001.safetensors",
        MANIFEST_FILE,
    }
    assert num_bytes == (folder / "model-00001.safetensors").stat().st_size
    assert (folder / "config.json").read_text() == (model.path / "config.json").read_text()
    source = open_quantized(folder)
    again = plan_quantized(PARAMETERS, source, "bfloat16")
    assert (again.weights, again.specs, again.dtype) == (plan.weights, plan.specs, plan.dtype)
    expected = {name: bits(plane) for name, plane in planes_of(plan, weights).items()}
    assert read_all(source, again, 100_000) == expected
    source.close()


def test_save_quantized_is_read_by_the_safetensors_package(tmp_path, model):
    plan = plan_of(model)
    weights = loaded(plan)
    save_quantized(tmp_path / "out", model, plan, weights)
    with safe_open(tmp_path / "out" / "model-00001.safetensors", "pt") as file:
        for name, plane in planes_of(plan, weights).items():
            stored = file.get_tensor(name)
            assert (stored.dtype, stored.shape) == (plane.dtype, plane.shape)
            assert bits(stored) == bits(plane)


def test_save_quantized_writes_planes_in_plan_order(tmp_path, model, monkeypatch):
    monkeypatch.setattr(quantized_writer, "MAX_FILE_BYTES", 400_000)
    plan = plan_of(model)
    weights = loaded(plan)
    save_quantized(tmp_path / "out", model, plan, weights, Mesh(1, 2))
    manifest = read_manifest(tmp_path / "out" / MANIFEST_FILE)
    assert [name for file in manifest.files for name in file.checksums] == [spec.name for spec in plan.specs]
    assert len(manifest.files) == 3
    sizes = {spec.name: spec.num_bytes for spec in plan.specs}
    for file in manifest.files:
        assert sum(sizes[name] for name in file.checksums) <= 400_000 or len(file.checksums) == 1
    assert (manifest.mesh, manifest.source) == (Mesh(1, 2), identify_source(model))
    source = open_quantized(tmp_path / "out")
    assert list(source.entries) == [spec.name for spec in plan.specs]
    source.close()


def test_files_of_gives_an_oversized_plane_its_own_file():
    specs = [
        TensorSpec(name, (size,), "int8") for name, size in (("a", 2**30), ("b", 5 * 2**30), ("c", 1), ("d", 2**32))
    ]
    assert [[spec.name for spec in file] for file in files_of(specs)] == [["a"], ["b"], ["c"], ["d"]]
    assert list(files_of([])) == []


def test_save_quantized_is_independent_of_chunk_size(tmp_path, model, monkeypatch):
    plan = plan_of(model)
    weights = loaded(plan)
    save_quantized(tmp_path / "one", model, plan, weights)
    monkeypatch.setattr(quantized_writer, "CHUNK_BYTES", 256 * 2**10)
    save_quantized(tmp_path / "two", model, plan, weights)
    for name in ("model-00001.safetensors", MANIFEST_FILE):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_save_quantized_writes_host_tensors_without_a_copy(tmp_path, model, monkeypatch):
    plan = plan_of(model)
    weights = loaded(plan)
    addresses = {plane.data_ptr() for plane in planes_of(plan, weights).values()}
    seen: list[int] = []
    on_host = quantized_writer.PlaneWriter.on_host

    def watched(self, piece: torch.Tensor) -> torch.Tensor:
        host = on_host(self, piece)
        seen.append(host.data_ptr())
        return host

    monkeypatch.setattr(quantized_writer.PlaneWriter, "on_host", watched)
    save_quantized(tmp_path / "out", model, plan, weights)
    assert set(seen) == addresses


@pytest.mark.gpu
def test_save_quantized_copies_gpu_weights_through_one_chunk(tmp_path, model, device):
    plan = plan_of(model)
    weights = loaded(plan)
    there = {}
    for name, weight in weights.items():
        if isinstance(weight, torch.Tensor):
            there[name] = weight.to(device)
        else:
            there[name] = replace(weight, codes=weight.codes.to(device), scales=weight.scales.to(device))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    save_quantized(tmp_path / "out", model, plan, there)
    assert torch.cuda.max_memory_allocated() == before
    source = open_quantized(tmp_path / "out")
    expected = {name: bits(plane) for name, plane in planes_of(plan, weights).items()}
    assert read_all(source, plan_quantized(PARAMETERS, source, "bfloat16"), 2**20) == expected
    source.close()


@pytest.mark.slow
def test_save_quantized_killed_leaves_no_whole_folder(tmp_path, model):
    tests = Path(__file__).parent.parent.parent
    environment = os.environ | {"PYTHONPATH": str(tests)}
    done = subprocess.run([sys.executable, "-c", CRASH, str(tmp_path)], env=environment, check=False)
    assert done.returncode == -signal.SIGKILL
    (left,) = [path for path in tmp_path.iterdir() if path.name != "m"]
    assert left.name.startswith(".out.")
    assert not (left / MANIFEST_FILE).exists()
    plan = plan_of(model)
    save_quantized(tmp_path / "out", model, plan, loaded(plan))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m", "out"]


def test_save_quantized_full_disk_leaves_nothing(tmp_path, model, monkeypatch):
    plan = plan_of(model)

    def full(file: FileIO, data: memoryview) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(quantized_writer, "write_fully", full)
    with raises_code("weights.cannot_save", ConfigError):
        save_quantized(tmp_path / "out", model, plan, loaded(plan))
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


@pytest.mark.parametrize("when", ["load", "save"])
def test_save_quantized_changed_model_is_refused(tmp_path, model, monkeypatch, when):
    plan, config = plan_of(model), model.path / "config.json"
    planned = refuse_saving(tmp_path / "out", model, plan)
    copy = quantized_writer.copy_settings

    def change(source: Path, folder: Path) -> None:
        config.write_text('{"model_type": "another"}')
        copy(source, folder)

    if when == "load":
        config.write_text('{"model_type": "another"}')
    else:
        monkeypatch.setattr(quantized_writer, "copy_settings", change)
    with raises_code("weights.cannot_save", ConfigError):
        save_quantized(tmp_path / "out", model, plan, loaded(plan), planned=planned)
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_save_quantized_beside_another_process_is_refused(tmp_path, model):
    plan, out = plan_of(model), tmp_path / "out"

    def intrude(done: int, total: int) -> None:
        out.mkdir(exist_ok=True)
        (out / "theirs").touch()

    with raises_code("weights.cannot_save", ConfigError):
        save_quantized(out, model, plan, loaded(plan), on_progress=intrude)
    assert [path.name for path in out.iterdir()] == ["theirs"]


def test_save_quantized_unwritable_folder_is_refused(tmp_path, model, monkeypatch):
    def refuse(*arguments: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr("holdfast.loading.quantized.writer.os.mkdir", refuse)
    plan = plan_of(model)
    with raises_code("weights.cannot_save", ConfigError):
        save_quantized(tmp_path / "out", model, plan, loaded(plan))


def test_refuse_saving_unsavable_models_before_a_load(tmp_path, model, monkeypatch):
    plan, out = plan_of(model), tmp_path / "out"
    assert refuse_saving(out, model, plan) == identify_source(model)
    with raises_code("weights.cannot_save", ConfigError):
        refuse_saving(out, replace(model, source=DummySource(PARAMETERS, "bfloat16")), plan)
    with raises_code("weights.cannot_save", ConfigError):
        refuse_saving(out, model, plan_of(model, WeightRecipe()))
    with raises_code("weights.cannot_save", ConfigError):
        refuse_saving(out, replace(model, kind="gguf"), plan)
    with raises_code("weights.cannot_save", ConfigError):
        refuse_saving(model.path, model, plan)
    with raises_code("weights.cannot_save", ConfigError):
        refuse_saving(model.path / "config.json", model, plan)
    with raises_code("weights.cannot_save", ConfigError):
        refuse_saving(tmp_path / "a" / "b", model, plan)
    full = SimpleNamespace(free=10, total=20)
    monkeypatch.setattr("holdfast.loading.quantized.writer.shutil.disk_usage", lambda path: full)
    with raises_code("weights.cannot_save", ConfigError):
        refuse_saving(out, model, plan)


def test_plan_digest_changes_with_weights_and_moves(model):
    plans = [
        plan_of(model),
        plan_of(model, WeightRecipe(MXFP4)),
        plan_of(model, WeightRecipe(FP8, "none")),
        plan_of(model, dtype="float16"),
    ]
    moved = replace(plans[0], moves=(replace(plans[0].moves[0], tensor="else"), *plans[0].moves[1:]))
    assert len({plan_digest(plan) for plan in (*plans, moved)}) == 5
    assert plan_digest(plan_of(model)) == plan_digest(plans[0])


def test_save_quantized_link_out_of_the_model_is_refused(tmp_path, model):
    (tmp_path / "secret").write_text("secret")
    (model.path / "tokenizer_config.json").symlink_to(tmp_path / "secret")
    plan = plan_of(model)
    with raises_code("file.bad_link", ModelFormatError):
        save_quantized(tmp_path / "out", model, plan, loaded(plan))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m", "secret"]


def test_save_quantized_manifest_is_plain_json(tmp_path, model):
    plan = plan_of(model)
    save_quantized(tmp_path / "out", model, plan, loaded(plan))
    values = json.loads((tmp_path / "out" / MANIFEST_FILE).read_text())
    assert (values["format"], values["recipe"]["scheme"], values["dtype"]) == ("holdfast weights", "fp8", "bfloat16")
    assert values["weights"][2] == {
        "name": "layers.0.qkv.weight",
        "shape": [1280, 256],
        "dtype": "bfloat16",
        "scheme": {"name": "fp8", "block_rows": 1},
    }
