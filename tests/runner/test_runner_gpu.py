"""What is promised of a GPU: replays are the kernels to the bit, and after ready nothing is taken, moved, compiled or awaited."""

import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.errors import MemoryPlanError
from holdfast.planning.terms import LIBRARY_BYTES
from holdfast.request.sampling_params import SamplingParams
from holdfast.request.sequence import LiveStep, ScheduledSequence
from holdfast.runner import assembly, weight_load
from holdfast.runner.build import BuiltRunner
from kernels.exactness import same_bits
from runner.gpu_traffic import (
    CheckedReplays,
    Known,
    build_dummy,
    in_a_row,
    num_compiled,
    recorded,
    traffic,
    write_model,
)
from runner.tiny_runners import held_storages

pytestmark = pytest.mark.gpu

MIB = 2**20
GREEDY = SamplingParams(temperature=0.0)
NUM_STEPS = 1000
NOT_TENSORS = ("cuda context", "libraries", "allocator", "cuda graphs")
"""Owners that hold no tensors of torch's."""
LARGE = {"max_num_seqs": 512, "max_num_batched_tokens": 8192}
"""Pages, workspace and buffers that all take more than someone leaves."""
MODES = [
    pytest.param("qwen3", {}, id="qwen3"),
    pytest.param("windows", {}, id="windows"),
    pytest.param("gpt_oss", {}, id="gpt-oss"),
    pytest.param("gemma3", {}, id="gemma 3"),
    pytest.param("qwen3", {"dtype": "float16"}, id="float16, without the fused decode path"),
    pytest.param("experts", {}, id="experts"),
    pytest.param("qwen3", {"quantization": "fp8"}, id="fp8"),
    pytest.param("experts", {"quantization": "fp8"}, id="experts in fp8"),
    pytest.param("latent", {}, id="latents"),
    pytest.param("sparse", {}, id="sparse latents"),
]
SCHEMES = [
    pytest.param("qwen3", {"quantization": "int8"}, id="int8"),
    pytest.param("qwen3", {"quantization": "fp8_block"}, id="fp8_block"),
    pytest.param("shared", {"quantization": "mxfp4"}, id="shared expert, mxfp4"),
    pytest.param("shared", {"quantization": "fp8_tensor", "quantization_ignore": ("*.o_proj",)}, id="some left alone"),
]
"""What differs from the modes in its products alone."""
FORMATS = [
    pytest.param("experts", {"quantization": "fp8_block"}, id="experts in fp8_block"),
    pytest.param("windows", {"kv_cache_dtype": "turboquant_k8v4"}, id="k8v4"),
    pytest.param("latent", {"kv_cache_dtype": "turboquant_mla_4bit"}, id="latents of 4 bits"),
    pytest.param("latent_q", {"kv_cache_dtype": "fp8_ds_mla", "quantization": "fp8"}, id="latents in fp8"),
    pytest.param("sparse", {"kv_cache_dtype": "fp8_ds_mla"}, id="sparse latents in fp8"),
    pytest.param("sparse", {"index_cache_dtype": "bfloat16"}, id="sparse latents, index in bfloat16"),
]
"""Blocks of experts with scales for blocks of columns, and compressed pages."""
ALL_CODED = {"kv_protected_layers": 0}
"""Without it all three layers of a tiny model would stay in a wider format."""
TURBOQUANT = [
    pytest.param("qwen3", {"kv_cache_dtype": "turboquant_k8v4"}, id="k8v4, heads of 64"),
    pytest.param("qwen3_wide", {"kv_cache_dtype": "turboquant_k8v4"}, id="k8v4, heads of 128"),
    pytest.param("qwen3", {"kv_cache_dtype": "turboquant_4bit_nc", **ALL_CODED}, id="4 bits, heads of 64"),
    pytest.param("qwen3_wide", {"kv_cache_dtype": "turboquant_4bit_nc", **ALL_CODED}, id="4 bits, heads of 128"),
    pytest.param("qwen3", {"kv_cache_dtype": "turboquant_3bit_nc", **ALL_CODED}, id="3 bits, heads of 64"),
    pytest.param("qwen3_wide", {"kv_cache_dtype": "turboquant_3bit_nc", **ALL_CODED}, id="3 bits, heads of 128"),
    pytest.param("windows", {"kv_cache_dtype": "turboquant_k8v4"}, id="k8v4, windows"),
    pytest.param("gpt_oss", {"kv_cache_dtype": "turboquant_4bit_nc", "kv_protected_layers": 2}, id="4 bits, sinks"),
]
"""Pages of codes; the last has two formats in one cache."""


@pytest.fixture
def build(tmp_path: Path) -> Iterator[Callable[..., BuiltRunner]]:
    """build(name, **options) -> a runner of a tiny model; all are released in the end."""
    made: list[BuiltRunner] = []

    def build_one(name: str = "qwen3", **options: Any) -> BuiltRunner:
        made.append(build_dummy(tmp_path, name, **options))
        return made[-1]

    yield build_one
    for built in made:
        built.release()


def assert_coded(built: BuiltRunner, options: dict[str, Any]) -> None:
    """A layer at least has the format that a test asks for."""
    name = options.get("kv_cache_dtype", "auto")
    if name != "auto":
        assert name in {layer.format.name for layer in built.storage.spec.layers}, f"no layer is in {name}"


def counters() -> dict[str, int]:
    """What the allocator has done since the start of the process."""
    stats = torch.cuda.memory_stats()
    names = ("allocation.all.allocated", "allocation.all.freed", "segment.all.allocated", "segment.all.freed")
    return {name: stats[name] for name in names}


def known(number: int, length: int, prompt_length: int | None = None) -> Known:
    return Known(number, prompt_length or length, length, 1000, GREEDY)


def run(built: BuiltRunner, one: Known, num_tokens: int, first_page: int) -> None:
    """A step of one sequence alone, on pages in a row."""
    built.runner.execute(LiveStep((one.schedule(num_tokens, in_a_row(built.runner.groups, first_page)),)))


def fill_context(built: BuiltRunner, one: Known, num_tokens: int, first_page: int) -> None:
    """All but what is left for the test itself."""
    while one.position < num_tokens:
        run(built, one, min(256, num_tokens - one.position), first_page)


@pytest.mark.parametrize(("name", "options"), MODES + SCHEMES + TURBOQUANT)
def test_graph_replay_equals_eager_kernels_to_the_bit(build, name, options):
    built = build(name, **options)
    assert_coded(built, options)
    checked = CheckedReplays(built)
    for step in traffic(built).steps(400):
        built.runner.execute(step)
    assert {(size, True) for size in (1, 2, 4, 8)} <= set(checked.sizes)
    assert {(size, False) for size in (64, 128, 256)} <= set(checked.sizes)


@pytest.mark.parametrize(("name", "options"), MODES + SCHEMES)
def test_graph_logits_are_near_eager_logits(build, name, options):
    """Not the same to the bit: steps without graphs are not padded, and products of other sizes round otherwise."""
    logits = []
    for enforce_eager in (False, True):
        built = build(name, enforce_eager=enforce_eager, **options)
        with recorded(built) as kept:
            for step in traffic(built).steps(200, asks_prompts=True):
                built.runner.execute(step)
        logits.append(kept)
        built.release()
    spread = max(float(rows.std()) for rows in logits[0])
    # Where inputs of products are codes, another rounding may choose another code.
    share = 0.5 if options.get("quantization", "").startswith("fp8") else 0.1
    for left, right in zip(*logits, strict=True):
        assert bool(left.isfinite().all())
        assert float((left - right).abs().max()) < share * spread


@pytest.mark.parametrize(("name", "options"), MODES + TURBOQUANT)
def test_captured_at_length_one_replayed_at_the_longest_and_back(build, name, options):
    # Pages in a row are those of groups that keep them.
    built = build(name, **options, kv_near_tokens=0)
    assert_coded(built, options)
    longest = built.runner.limits.max_model_len
    sequences = {"long": (known(1, longest), 0), "short": (known(2, 1), longest // 16), "middle": (known(3, 300), 130)}
    for one, first_page in sequences.values():
        fill_context(built, one, len(one.tokens) - 1, first_page)
    checked, seen = CheckedReplays(built), {}
    for key in ("short", "long", "short", "middle", "long", "middle", "short"):
        one, first_page = sequences[key]
        one.position = len(one.tokens) - 1
        with recorded(built) as kept:
            run(built, one, 1, first_page)
        assert same_bits(seen.setdefault(key, kept[0]), kept[0]), f"{key} depends on what ran before"
    assert checked.sizes == [(1, True)] * 7


def test_graph_shrinking_batch_leaves_no_trace(build):
    """The largest batch at the longest contexts, then one row in a graph for more of them."""
    built = build()
    everybody = [known(number, 500) for number in range(8)]
    for number, one in enumerate(everybody):
        fill_context(built, one, 499, 40 * number)
    checked, seen = CheckedReplays(built), {}
    for count in (8, 3, 5, 8, 1, 3, 5, 8):
        items = []
        for one in everybody[:count]:
            one.position = 499
            items.append(one.schedule(1, lambda sequence, start, end: None))
        with recorded(built) as kept:
            built.runner.execute(LiveStep(tuple(items)))
        assert same_bits(seen.setdefault(count, kept[0]), kept[0])
    assert {size for size, _ in checked.sizes} == {1, 4, 8}


@pytest.mark.parametrize(("name", "options"), MODES)
@pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("decode_share", [1.0, 0.4], ids=["decode", "mixed"])
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_after_ready_nothing_is_taken_moved_compiled_or_awaited(build, name, options, enforce_eager, decode_share):
    """Batches change at every step, contexts grow, and every way of choosing tokens has its turn."""
    run_after_ready(build(name, enforce_eager=enforce_eager, **options), NUM_STEPS, decode_share)


@pytest.mark.parametrize(("name", "options"), SCHEMES + FORMATS)
@pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_runner_after_ready_other_products_take_nothing(build, name, options, enforce_eager):
    """What differs is which kernels there are, and fewer steps find a form that was not compiled."""
    run_after_ready(build(name, enforce_eager=enforce_eager, **options), NUM_STEPS // 4, 0.4)


def run_after_ready(built: BuiltRunner, num_steps: int, decode_share: float) -> None:
    """Traffic through a runner that is ready: memory, places and compiled kernels stay, and no step waits but for its result."""
    torch.cuda.synchronize()
    places, before, compiled = held_storages(built.runner), counters(), num_compiled()
    assert len(places) >= 8, "the buffers were not found"
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in traffic(built).steps(num_steps, decode_share, asks_prompts=decode_share < 1.0):
            built.runner.execute(step)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert counters() == before
    assert held_storages(built.runner) == places
    assert num_compiled() == compiled, "a kernel was compiled after ready"


def poison(built: BuiltRunner, free_pages: list[int]) -> None:
    """NaN wherever nothing may be read: free pages, which all unused places of the page table name, and the workspace.

    Inputs that a step has yet to fill name a token and a slot that exist, so that their use shows and breaks nothing.
    """
    runner: Any = built.runner
    device = runner.device
    if device.type == "cuda":
        torch.cuda.synchronize()
    spec, num_pages = built.storage.spec, built.storage.num_pages
    for layer in range(len(spec.layers)):
        num_chunks = spec.groups[spec.group_of(layer)].chunks_per_page
        chunks = torch.tensor([j * num_pages + page for page in free_pages for j in range(num_chunks)], device=device)
        slots = chunks.unsqueeze(1) * spec.page_tokens + torch.arange(spec.page_tokens, device=device)
        for own in spec.layers[layer].planes:  # near planes lie over these
            plane = built.storage.plane(layer, own.name)
            # All bits set are NaN in every float type. Codes of 3 and 4 bits become the largest, with a scale of NaN.
            plane.view(torch.uint8)[slots.flatten()] = 0xFF
    for lane, memory in runner.model.workspace.lanes.items():
        if lane != "fused_decode":  # small-batch GEMMs count in it, and leave it at zero
            memory.fill_(0xFF)
    inputs, table = runner.buffers.inputs, runner.buffers.page_table
    inputs.host.fill(7)
    inputs.tensor.fill_(7)
    # On a CPU a step reads the tables of its sequences themselves.
    tables = [] if table is None else zip(table.tables, table.num_chunks_by_row(), strict=True)
    for table_NP, num_chunks_by_row in tables:
        fresh_NP = torch.full_like(table_NP, free_pages[0])
        for row, num_chunks in num_chunks_by_row.items():
            fresh_NP[row, :num_chunks] = table_NP[row, :num_chunks]
        table_NP.copy_(fresh_NP)
    if device.type == "cuda":
        torch.cuda.synchronize()


@pytest.mark.parametrize(("name", "options"), MODES + TURBOQUANT)
@pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "eager"])
def test_runner_ignores_free_pages_and_padded_rows(build, name, options, enforce_eager):
    built = build(name, enforce_eager=enforce_eager, **options)
    assert_coded(built, options)
    check_free_pages(built, 150)


def check_free_pages(built: BuiltRunner, num_steps: int) -> None:
    """Just the same steps twice: the second time NaN lies wherever nothing may be read."""
    runs = []
    for is_poisoned in (False, True):
        source = traffic(built)
        with recorded(built) as kept:
            for step in source.steps(num_steps):
                if is_poisoned:
                    poison(built, source.free_pages)
                built.runner.execute(step)
        runs.append(kept)
    assert len(runs[0]) > num_steps // 2
    for clean, poisoned in zip(*runs, strict=True):
        assert bool(clean.isfinite().all())
        assert same_bits(clean, poisoned)


def tensor_bytes(built: BuiltRunner) -> int:
    return sum(entry.num_bytes for entry in built.ledger if not entry.owner.startswith(NOT_TENSORS))


@pytest.mark.alone
def test_runner_two_engines_at_once_keep_their_logits(build):
    """The second sees what the first has taken, and neither disturbs the other."""
    alone = {}
    for name in ("qwen3", "windows"):
        built = build(name)
        with recorded(built) as alone[name]:
            for step in traffic(built).steps(60):
                built.runner.execute(step)
        built.release()
    options = {"max_num_seqs": 512, "max_model_len": 4096, "kv_cache_memory": "1GiB", "enforce_eager": True}
    first = build("qwen3", **options)
    second = build("windows", **options)
    seen = first.plan.target.available_bytes - second.plan.target.available_bytes
    assert abs(seen - tensor_bytes(first)) < 96 * MIB
    first.release()
    second.release()
    engines = {name: build(name) for name in ("qwen3", "windows")}
    storages = [held_storages(built.runner) for built in engines.values()]
    assert not storages[0].keys() & storages[1].keys()
    sources = {name: traffic(built).steps(60) for name, built in engines.items()}
    together: dict[str, list[torch.Tensor]] = {name: [] for name in engines}
    for _ in range(60):
        for name, built in engines.items():
            with recorded(built) as kept:
                built.runner.execute(next(sources[name]))
            together[name] += kept
    for name, rows in together.items():
        assert all(same_bits(left, right) for left, right in zip(rows, alone[name], strict=True))


def take_all_but(num_bytes: int) -> list[torch.Tensor]:
    """Another, who leaves that much: in as few pieces as the device allows."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    taken: list[torch.Tensor] = []
    size = torch.cuda.mem_get_info()[0]
    while size >= 2 * MIB:
        size = min(size, torch.cuda.mem_get_info()[0] - num_bytes) // (2 * MIB) * 2 * MIB
        try:
            taken.append(torch.empty(max(size, 0), dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            size //= 2
    return taken


@pytest.mark.alone
def test_build_on_filled_device_refused_with_table(build):
    build().release()  # the context and its libraries are there now
    hogs = take_all_but(8 * MIB)
    with pytest.raises(MemoryPlanError) as caught:
        build(max_num_seqs=64)
    assert caught.value.table is not None
    assert "others" in caught.value.table.budget_reason
    hogs.clear()
    torch.cuda.empty_cache()
    build(max_num_seqs=64)


@pytest.mark.alone
@pytest.mark.parametrize(
    ("module", "stage"),
    [(weight_load, "load_weights"), (assembly, "PageStorage"), (assembly, "Workspace"), (assembly, "Runner")],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_build_memory_taken_by_others_is_reported_and_freed(build, monkeypatch, module, stage):
    """The plan fits, and then someone is faster; the error is kept while it is looked at."""
    build(**LARGE).release()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]
    hogs: list[list[torch.Tensor]] = []
    real = getattr(module, stage)

    def late(*arguments: Any, **options: Any) -> Any:
        hogs.append(take_all_but(2 * MIB))
        return real(*arguments, **options)

    monkeypatch.setattr(module, stage, late)
    error = None
    try:
        build(**LARGE)
    except MemoryPlanError as caught:
        error = caught
    assert error is not None, "it fitted"
    assert error.table is not None
    assert "\n" not in str(error)
    assert len(hogs) == 1
    hogs.clear()
    torch.cuda.empty_cache()
    kept_bytes = torch.cuda.memory_allocated() - before[0]
    assert kept_bytes <= (LIBRARY_BYTES if stage == "Runner" else 0), "the error keeps what it named"
    assert torch.cuda.mem_get_info()[0] >= before[1] - 64 * MIB
    monkeypatch.undo()
    build(**LARGE)


@pytest.mark.parametrize("closes", [True, False], ids=["closed", "left open"])
def test_engine_on_failed_device_dies_without_ending_process(tmp_path, closes):
    """In a process of its own, with steps before: the copies of a step are what torch asks the device for when pinned memory goes."""
    folder = write_model(tmp_path, "qwen3")
    code = f"""
import torch
from holdfast import LLM, SamplingParams
from holdfast.errors import HoldfastError
llm = LLM({str(folder)!r}, load_format="dummy", tokenizer="none", device="cuda", max_model_len=128, max_num_seqs=4, kv_cache_memory=2**26)
prompts, params = [{{"prompt_token_ids": [9, 10, 11]}}], SamplingParams(max_tokens=8, ignore_eos=True)
llm.generate(prompts, params, progress=False)
torch.zeros(1, device="cuda")[torch.tensor([7], device="cuda")]  # which no kernel may read
try:
    llm.generate(prompts, params, progress=False)
except HoldfastError as error:
    print(type(error).__name__)
if {closes}:
    llm.shutdown()
    del llm
print("ends")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.splitlines()[-2:] == ["EngineDeadError", "ends"], done.stdout


def test_release_gives_back_device_memory(build):
    """But for workspaces of cuBLAS, which torch keeps for every stream that there was."""
    build().release()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    built = build(**LARGE)
    for step in traffic(built).steps(5):
        built.runner.execute(step)
    assert torch.cuda.memory_allocated() - before >= tensor_bytes(built)
    built.release()
    assert torch.cuda.memory_allocated() - before <= LIBRARY_BYTES


@pytest.mark.parametrize("quantization", [None, "fp8", "int8", "fp8_block", "mxfp4"])
@pytest.mark.parametrize("name", ["qwen3", "experts", "shared", "latent", "latent_q"])
def test_logits_are_those_of_a_cpu(build, name, quantization):
    """Just the same weights in float32 on a CPU, through the references; a GPU rounds to bfloat16 all the way."""
    logits = []
    for where in ({"device": "cpu", "dtype": "float32", "kv_cache_memory": "1GiB"}, {"device": "cuda"}):
        built = build(name, quantization=quantization, **where)
        with recorded(built) as kept:
            for step in traffic(built).steps(12, asks_prompts=True):
                built.runner.execute(step)
        logits.append([rows.cpu() for rows in kept])
        built.release()
    near = torch.cat(
        [torch.cosine_similarity(left.float(), right.float()) for left, right in zip(*logits, strict=True)]
    )
    assert float(near.median()) > 0.99
    assert float(near.min()) > 0.8, "more than an expert that another rounding has chosen"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "eager"])
def test_runner_batch_invariance_on_gpu(tmp_path, dtype, enforce_eager):
    """In a process of its own: cuBLAS reads its settings when it is first used."""
    folder = write_model(tmp_path, "qwen3")
    code = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent.parent)!r})
from pathlib import Path
from runner.test_runner_gpu import check_companies
check_companies(Path({str(folder.parent)!r}), {dtype!r}, {enforce_eager!r})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


def check_companies(
    folder: Path, dtype: str, enforce_eager: bool, counts: Iterable[int] = range(34), longest: int = 900
) -> None:
    """A row's logits alone, and in company of 1 to 33: while decoding, and at the end of a prompt, however that is cut."""
    options = {"max_num_seqs": 40, "batch_invariant": True, "dtype": dtype, "enforce_eager": enforce_eager}
    built = build_dummy(folder, "qwen3", **options)
    target = known(1, 700)
    others = [known(2 + index, 20 + 37 * index % longest) for index in range(33)]
    fill_context(built, target, 650, 0)
    for index, one in enumerate(others):
        fill_context(built, one, len(one.tokens) - 1, 60 + 60 * index)
        one.sequence.num_prompt_tokens = len(one.tokens) - 1  # from here on it decodes
    found = []
    for start, num_prompt in (
        (650, 700),
        (699, 700),
        (699, 699),
    ):  # a chunk of fifty, its last row alone, a decoded row
        expected, target.sequence.num_prompt_tokens = None, num_prompt
        for count in counts:
            target.position = start
            items = [_again(built, target, 700 - start, 0)]
            for index, one in enumerate(others[:count]):
                one.position = len(one.tokens) - 1
                items.append(_again(built, one, 1, 60 + 60 * index))
            place = count // 2
            items.insert(place, items.pop(0))
            with recorded(built) as kept:
                built.runner.execute(LiveStep(tuple(items)))
            row = kept[0][place]
            expected = row if expected is None else expected
            assert same_bits(row, expected), f"in company of {count} from position {start} on, prompt of {num_prompt}"
        found.append(expected)
    assert same_bits(found[1], found[0]), "a prompt that is cut elsewhere"


def _again(built: BuiltRunner, one: Known, num_tokens: int, first_page: int) -> ScheduledSequence:
    return one.schedule(num_tokens, in_a_row(built.runner.groups, first_page))
