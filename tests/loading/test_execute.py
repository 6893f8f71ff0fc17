import weakref
from pathlib import Path

import pytest
import torch

from holdfast.errors import MemoryPlanError, ModelFormatError
from holdfast.loading import dummy, execute
from holdfast.loading.directory import open_directory
from holdfast.loading.dummy import DummySource
from holdfast.loading.execute import PinnedLink, load_weights
from holdfast.loading.plan import plan_load
from holdfast.memory import arena
from holdfast.memory.ledger import Ledger
from holdfast.models.parameters import Parameter, Part
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


def watch_arenas(monkeypatch):
    """References to every block of memory that arenas take from now on."""
    made: list[weakref.ref] = []
    allocate = arena.allocate_bytes

    def watched(*args):
        block = allocate(*args)
        made.append(weakref.ref(block))
        return block

    monkeypatch.setattr(arena, "allocate_bytes", watched)
    return made


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
    assert ledger.total_bytes == plan_load(opened.parameters, opened.source, "float32").final_bytes
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
    assert {line.owner: line.num_bytes for line in ledger} == {f"weights/{name}": 256 for name in weights}
    assert {line.reason for line in ledger} == {"bfloat16 as the model computes with them"}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("made_up", [False, True], ids=["read", "written"])
def test_all_weights_lie_in_one_allocation_of_the_planned_size(dtype, made_up):
    odd = Parameter("odd.bias", (77,), (Part("odd.bias", 0, (77,)),))
    wide = Parameter("wide.weight", (5, 129), (Part("wide.weight", 0, (5, 129)),))
    parameters = (odd, *UNTIED, wide)
    source = DummySource(parameters, "float16") if made_up else MadeUpSource(tensors=tensors_for(parameters))
    plan = plan_load(parameters, source, dtype)
    ledger = Ledger()
    weights = load_weights(plan, source, "cpu", ledger, lambda done, total: None)
    assert list(weights) == [parameter.name for parameter in parameters]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in weights.values()}
    assert list(storages.values()) == [plan.final_bytes]
    assert all(tensor.data_ptr() % 256 == 0 for tensor in weights.values())
    assert all(tensor.is_contiguous() for tensor in weights.values())
    assert ledger.total_bytes == plan.final_bytes == sum(spec.aligned_bytes for spec in plan.specs)
    assert ledger.group_bytes() == {"weights": plan.final_bytes}, "staging is given back"
    for parameter in parameters:
        parts = [source.read_rows(part.tensor, 0, part.shape[0]) for part in parameter.parts]
        assert torch.equal(weights[parameter.name], torch.cat(parts).to(getattr(torch, dtype))), parameter.name


def test_staging_is_in_the_ledger_while_it_lasts():
    source = DummySource(UNTIED, "bfloat16")
    plan = plan_load(UNTIED, source, "bfloat16")
    ledger = Ledger()
    groups = []
    load_weights(plan, source, "cpu", ledger, lambda done, total: groups.append(ledger.group_bytes()))
    assert len(groups) == 1 + len(plan.moves)
    assert all(group == {"weights": plan.final_bytes, "staging": plan.staging_bytes("cpu")} for group in groups)


def test_rows_that_a_source_writes_itself_are_not_read_and_progress_counts_them(monkeypatch):
    monkeypatch.setattr(execute, "WRITE_BYTES", 40)
    source = DummySource(UNTIED, "float32")
    seen = []
    expected_weights = {p.name: torch.cat([source.read_rows(t.tensor, 0, t.shape[0]) for t in p.parts]) for p in UNTIED}
    monkeypatch.setattr(source, "read_rows", None)
    weights = load(UNTIED, source, on_progress=lambda done, total: seen.append((done, total)))
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected_weights.items())
    assert seen == [(done, 448) for done in range(0, 449, 32)], "two rows of 16 bytes at a time"


@pytest.mark.parametrize("chunk_bytes", [4, 12, 64, 1000])
@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.bfloat16])
def test_rows_pass_the_link_to_a_gpu_in_pieces_of_any_size(chunk_bytes, stored, monkeypatch):
    monkeypatch.setattr(execute, "CHUNK_BYTES", chunk_bytes)
    link = PinnedLink(torch.device("cpu"))
    buffers = [chunk.data_ptr() for chunk in link._chunks]
    for final in (torch.float32, torch.bfloat16):
        out = torch.full((9, 11), float("nan"), dtype=final)
        rows = torch.randn(7, 11).to(stored)
        link.send(rows[:4], out[1:5])
        link.send(rows.t().contiguous().t()[4:], out[5:8])
        assert torch.equal(bits(out[1:8]), bits(rows.to(final)))
        assert out[[0, 8]].isnan().all()
    assert [chunk.data_ptr() for chunk in link._chunks] == buffers


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
@pytest.mark.parametrize("made_up", [False, True], ids=["read", "written"])
def test_whatever_stops_a_load_leaves_nothing_behind(error, at, made_up, monkeypatch):
    made = watch_arenas(monkeypatch)
    calls = 0

    def stop(done, total):
        nonlocal calls
        calls += 1
        if calls > at:
            raise error

    ledger = Ledger()
    source = DummySource(UNTIED, "float32") if made_up else MadeUpSource(tensors=tensors_for(UNTIED))
    with pytest.raises(error if isinstance(error, type) else ModelFormatError) as caught:
        load(UNTIED, source, ledger=ledger, on_progress=stop)
    assert len(made) == (2 if made_up else 1)
    assert all(reference() is None for reference in made), "the error is at hand and holds no weights"
    assert list(ledger) == []
    del caught
    load(UNTIED, source, ledger=ledger)
    assert ledger.total_bytes == 3 * 256


@pytest.mark.parametrize("in_write", [False, True])
def test_a_source_that_fails_half_way_leaves_nothing_behind(in_write, monkeypatch):
    """The frames that failed have rows of the arena as arguments; the error keeps the frames."""
    made = watch_arenas(monkeypatch)
    source = DummySource(UNTIED, "float32") if in_write else MadeUpSource(tensors=tensors_for(UNTIED))
    if in_write:
        monkeypatch.setattr(dummy, "_repeat", lambda table, start, out: out.no_such_thing)
    else:
        monkeypatch.setattr(source, "read_rows", lambda name, row_start, row_end: torch.empty(0))
    ledger = Ledger()
    with pytest.raises(AttributeError if in_write else AssertionError):
        load(UNTIED, source, ledger=ledger)
    assert made
    assert all(reference() is None for reference in made)
    assert list(ledger) == []


@pytest.mark.parametrize("failing", [1, 2])
@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("no"), RuntimeError("can't allocate memory"), RuntimeError("CUDA error: out of memory")],
    ids=["device", "host", "pinned"],
)
def test_memory_that_cannot_be_had_is_told_with_sizes(failing, error, monkeypatch):
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
    has = {1: "as much in one piece could not", 2: "the staging to make them with could not"}[failing]
    with pytest.raises(MemoryPlanError, match=rf"the weights need 768 B on cpu; {has}"):
        load(UNTIED, DummySource(UNTIED, "float32"), ledger=ledger)
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


LARGE = Parameter("large.weight", (3000, 7000), (Part("a", 0, (1000, 7000)), Part("b", 1000, (2000, 7000))))
SMALL = Parameter("small.bias", (77,), (Part("small.bias", 0, (77,)),))


def load_watched(parameters, source, final, ledger, on_progress=lambda done, total: None):
    """Weights on the GPU, and the most bytes that were allocated there over what had been before."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    plan = plan_load(parameters, source, final)
    weights = load_weights(plan, source, "cuda", ledger, on_progress)
    return plan, weights, torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before


@pytest.mark.gpu
@pytest.mark.parametrize("final", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["read", "written", "tied"])
def test_a_gpu_holds_no_more_than_the_weights_and_the_staging_term(kind, final):
    parameters = TIED if kind == "tied" else (SMALL, LARGE, *UNTIED)
    tensors = tensors_for(parameters)
    if kind == "tied":
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    source = DummySource(parameters, "bfloat16") if kind == "written" else MadeUpSource(tensors=tensors)
    ledger = Ledger()
    plan, weights, peak_bytes, held_bytes = load_watched(parameters, source, final, ledger)
    granule_bytes = 512  # of torch's allocator
    assert plan.final_bytes <= held_bytes < plan.final_bytes + granule_bytes
    assert ledger.total_bytes == plan.final_bytes
    assert peak_bytes - held_bytes <= plan.staging_bytes("cuda")
    assert all(tensor.data_ptr() % 256 == 0 for tensor in weights.values())
    for parameter in parameters:
        parts = [source.read_rows(part.tensor, 0, part.shape[0]) for part in parameter.parts]
        wanted = torch.cat(parts).to(getattr(torch, final))
        assert torch.equal(bits(weights[parameter.name].cpu()), bits(wanted)), parameter.name


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["read", "written"])
def test_a_stopped_load_gives_the_gpu_everything_back(kind):
    source = DummySource([LARGE], "bfloat16") if kind == "written" else MadeUpSource(tensors=tensors_for([LARGE]))
    ledger = Ledger()

    def stop(done, total):
        if done:
            raise KeyboardInterrupt

    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    with pytest.raises(KeyboardInterrupt):
        load_watched([LARGE], source, "bfloat16", ledger, stop)
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == before
    assert list(ledger) == []


@pytest.mark.gpu
def test_a_gpu_without_room_for_the_weights_says_so():
    huge = Parameter("huge.weight", (2**21, 2**20), (Part("huge", 0, (2**21, 2**20)),))
    with pytest.raises(MemoryPlanError, match=r"the weights need 4096\.00 GiB on cuda; as much in one piece could not"):
        load_weights(
            plan_load([huge], DummySource([huge], "bfloat16"), "bfloat16"),
            DummySource([huge], "bfloat16"),
            "cuda",
            Ledger(),
            lambda done, total: None,
        )


@pytest.mark.gpu
def test_chunks_to_a_gpu_allocate_nothing_and_do_not_overtake_each_other(monkeypatch):
    monkeypatch.setattr(execute, "CHUNK_BYTES", 4096)
    link = PinnedLink(torch.device("cuda"))
    rows = torch.randn(5000, 100)
    out = torch.zeros(rows.shape, device="cuda")
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    buffer = torch.empty(10, 100)
    for start in range(0, 5000, 10):
        buffer.copy_(rows[start : start + 10])  # the source's buffer, filled anew
        link.send(buffer, out[start : start + 10])
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    assert torch.equal(out.cpu(), rows)
