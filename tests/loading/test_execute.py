import gc
import weakref
from pathlib import Path

import pytest
import torch

from holdfast.errors import MemoryPlanError, ModelFormatError
from holdfast.loading import execute
from holdfast.loading.directory import open_directory
from holdfast.loading.execute import load_weights
from holdfast.loading.plan import plan_load
from holdfast.memory.ledger import Ledger
from loading.made_up_source import TIED, UNTIED, MadeUpSource
from loading.tiny_models import FAMILIES, save_tiny


def tensors_for(parameters, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        part.tensor: torch.randn(part.shape, generator=generator)
        for parameter in parameters
        for part in parameter.parts
    }


def load(parameters, source, dtype="float32", ledger=None, on_progress=lambda done, total: None):
    plan = plan_load(parameters, source, dtype)
    return load_weights(plan, source, "cpu", ledger or Ledger(), on_progress)


def expected(parameter, state):
    return torch.cat([state[part.tensor] for part in parameter.parts])


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("max_shard_size", ["1GB", "50KB"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_of_every_family_arrives_bit_for_bit(family, max_shard_size, tmp_path, monkeypatch):
    model = save_tiny(family, tmp_path, max_shard_size=max_shard_size)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (max_shard_size == "50KB")
    opened = open_directory(tmp_path)
    monkeypatch.setattr(execute, "CHUNK_BYTES", 3000)
    ledger = Ledger()
    weights = load(opened.parameters, opened.source, ledger=ledger)
    state = model.state_dict()
    assert set(weights) == {parameter.name for parameter in opened.parameters}
    for parameter in opened.parameters:
        assert weights[parameter.name].shape == parameter.shape
        assert torch.equal(bits(weights[parameter.name]), bits(expected(parameter, state))), parameter.name
    assert ledger.total_bytes == sum(tensor.nbytes for tensor in weights.values())
    opened.source.close()


@pytest.mark.parametrize("stored", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("final", ["float32", "float16", "bfloat16"])
def test_types_are_converted_as_torch_converts_them(stored, final, tmp_path):
    model = save_tiny("qwen2", tmp_path, dtype=stored)
    opened = open_directory(Path(tmp_path))
    assert opened.spec.checkpoint_dtype == stored
    weights = load(opened.parameters, opened.source, final)
    for parameter in opened.parameters:
        wanted = expected(parameter, model.state_dict()).to(getattr(torch, final))
        assert torch.equal(bits(weights[parameter.name]), bits(wanted)), parameter.name
    opened.source.close()


@pytest.mark.parametrize("chunk_bytes", [1, 16, 17, 48, 64, 2**20])
def test_chunks_are_bounded_cover_everything_once_and_do_not_change_the_result(chunk_bytes, monkeypatch):
    monkeypatch.setattr(execute, "CHUNK_BYTES", chunk_bytes)
    source = MadeUpSource(tensors=tensors_for(UNTIED))
    weights = load(UNTIED, source)
    for parameter in UNTIED:
        assert torch.equal(weights[parameter.name], expected(parameter, source.tensors))
    for name, tensor in source.tensors.items():
        ranges = [(start, end) for read, start, end in source.reads if read == name]
        assert [start for start, _ in ranges] == [0, *(end for _, end in ranges[:-1])]
        assert ranges[-1][1] == tensor.shape[0]
        assert all((end - start) * 16 <= max(chunk_bytes, 16) for start, end in ranges)


def test_the_ledger_has_a_line_for_each_parameter():
    ledger = Ledger()
    weights = load(UNTIED, MadeUpSource(tensors=tensors_for(UNTIED)), "bfloat16", ledger)
    assert {line.owner: line.num_bytes for line in ledger} == {
        f"weights/{name}": tensor.nbytes for name, tensor in weights.items()
    }


def test_progress_rises_from_nothing_to_everything():
    seen = []
    source = MadeUpSource(tensors=tensors_for(UNTIED))
    load(TIED, MadeUpSource(tensors=source.tensors | {"lm_head.weight": source.tensors["model.embed_tokens.weight"]}),
         on_progress=lambda done, total: seen.append((done, total)))  # fmt: skip
    assert seen[0][0] == 0
    assert seen[-1][0] == seen[-1][1] == sum(tensor.nbytes for tensor in source.tensors.values())
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert len({total for _, total in seen}) == 1


@pytest.mark.parametrize("final", ["float32", "bfloat16"])
def test_a_tied_head_that_equals_the_embedding_is_loaded_once(final):
    tensors = tensors_for(TIED)
    tensors["model.embed_tokens.weight"][3, 1] = float("nan")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    assert set(load(TIED, MadeUpSource(tensors=tensors), final)) == {"embed.weight", "layers.0.qkv.weight"}


@pytest.mark.parametrize("row", [0, 7, 9])
def test_a_tied_head_that_differs_is_an_error_and_leaves_nothing(row, monkeypatch):
    monkeypatch.setattr(execute, "CHUNK_BYTES", 64)
    tensors = tensors_for(TIED)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["lm_head.weight"][row, 2] += 1
    ledger = Ledger()
    with pytest.raises(ModelFormatError, match=rf"m\.safetensors: 'lm_head.weight' differs .* in row {row};.*tie_word"):
        load(TIED, MadeUpSource(tensors=tensors), ledger=ledger)
    assert list(ledger) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, ModelFormatError("a", "b", "c")])
@pytest.mark.parametrize("at", [0, 1, 4])
def test_whatever_stops_a_load_leaves_nothing_behind(error, at, monkeypatch):
    made: list[weakref.ref] = []
    empty = torch.empty

    def watched_empty(*args, **kwargs):
        tensor = empty(*args, **kwargs)
        made.append(weakref.ref(tensor))
        return tensor

    calls = 0

    def stop(done, total):
        nonlocal calls
        calls += 1
        if calls > at:
            raise error

    monkeypatch.setattr(torch, "empty", watched_empty)
    ledger = Ledger()
    with pytest.raises(error if isinstance(error, type) else ModelFormatError):
        load(UNTIED, MadeUpSource(tensors=tensors_for(UNTIED)), ledger=ledger, on_progress=stop)
    gc.collect()
    assert len(made) == 3
    assert all(reference() is None for reference in made)
    assert list(ledger) == []
    weights = load(UNTIED, MadeUpSource(tensors=tensors_for(UNTIED)), ledger=ledger)
    assert ledger.total_bytes == sum(tensor.nbytes for tensor in weights.values())


def test_memory_that_cannot_be_had_is_told_with_sizes(monkeypatch):
    def refuse(*args, **kwargs):
        raise torch.OutOfMemoryError("no")

    monkeypatch.setattr(torch, "empty", refuse)
    ledger = Ledger()
    with pytest.raises(MemoryPlanError, match=r"the weights need 448 B on cpu; embed\.weight with 160 B"):
        load(UNTIED, MadeUpSource(tensors=tensors_for(UNTIED)), ledger=ledger)
    assert list(ledger) == []


def test_other_failures_of_allocation_are_not_called_a_lack_of_memory(monkeypatch):
    def refuse(*args, **kwargs):
        raise RuntimeError("Found no NVIDIA driver on your system")

    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(RuntimeError, match="driver"):
        load(UNTIED, MadeUpSource(tensors=tensors_for(UNTIED)))


@pytest.mark.gpu
@pytest.mark.parametrize("final", ["float32", "float16", "bfloat16"])
def test_a_gpu_gets_the_same_bits(final, tmp_path, monkeypatch):
    monkeypatch.setattr(execute, "CHUNK_BYTES", 3000)
    save_tiny("llama_tied", tmp_path, max_shard_size="50KB")
    opened = open_directory(tmp_path)
    plan = plan_load(opened.parameters, opened.source, final)
    on_cpu = load_weights(plan, opened.source, "cpu", Ledger(), lambda done, total: None)
    on_gpu = load_weights(plan, opened.source, "cuda", Ledger(), lambda done, total: None)
    for name, tensor in on_cpu.items():
        assert torch.equal(bits(tensor), bits(on_gpu[name].cpu())), name
    opened.source.close()
