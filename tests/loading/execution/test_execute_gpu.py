"""Loads on a GPU: the bytes of a load on a CPU, in the memory that was planned."""

from dataclasses import replace

import pytest
import torch

from error_codes import raises_code
from holdfast.errors import MemoryPlanError
from holdfast.loading.execution.execute import load_weights
from holdfast.loading.planning.plan import plan_load
from holdfast.loading.sources.dummy import DummySource
from holdfast.memory.ledger import Ledger
from holdfast.models.parameters import Parameter, Part
from holdfast.quant.weight_schemes import AS_STORED, WEIGHT_SCHEMES, WeightRecipe
from loading.mixed_model import bits, parameters_for, planes_of, tensors_for, uprights
from loading.smaller_chunks import chunks_of
from loading.tensor_source import TIED, UNTIED, TensorSource

pytestmark = pytest.mark.gpu

RECIPES = {"none": AS_STORED} | {name: WeightRecipe(scheme, "all") for name, scheme in WEIGHT_SCHEMES.items()}
GRANULE_BYTES = 2**21
"""What torch's allocator rounds large requests up to."""
LARGE = Parameter("large.weight", (6144, 7040), (Part("a", 0, (2048, 7040)), Part("b", 2048, (4096, 7040))))
SMALL = Parameter("small.bias", (77,), (Part("small.bias", 0, (77,)),), "bias")


def silent(done, total):
    pass


def random_tensors(parameters, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(0)
    return {p.tensor: torch.randn(p.shape, generator=generator).to(dtype) for q in parameters for p in q.parts}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("layout", ["apart", "fused", "transposed"])
@pytest.mark.parametrize("chunk_bytes", [5000, None])
@pytest.mark.parametrize("final", ["float32", "float16", "bfloat16"])
@pytest.mark.usefixtures("poison")
def test_gpu_load_matches_cpu_load_bit_for_bit(recipe, layout, chunk_bytes, final):
    parameters = parameters_for(layout)
    source = TensorSource(tensors=tensors_for(parameters, uprights()))
    plan = plan_load(parameters, source, final, RECIPES[recipe])
    on_cpu = load_weights(plan, source, "cpu", Ledger(), silent).weights
    with chunks_of(chunk_bytes):
        on_gpu = load_weights(plan, source, "cuda", Ledger(), silent).weights
    for name, weight in on_cpu.items():
        for ours, theirs in zip(planes_of(on_gpu[name]), planes_of(weight), strict=True):
            assert torch.equal(bits(ours.cpu()), bits(theirs)), name


def load_watched(parameters, source, recipe, ledger, on_progress=silent):
    """Weights on the GPU, the most bytes that were allocated there over what had been before, and what is left."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    plan = plan_load(parameters, source, "bfloat16", recipe)
    loaded = load_weights(plan, source, "cuda", ledger, on_progress)
    return plan, loaded, torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", ["read", "written", "tied"])
def test_gpu_load_peak_is_weights_plus_staging(kind, recipe):
    # What a tied head is compared with is an embedding that is the head too.
    parameters = (replace(TIED[0], kind="head"), *TIED[1:]) if kind == "tied" else (SMALL, LARGE, *UNTIED)
    if recipe == "mxfp4" and kind != "tied":
        parameters = (SMALL, LARGE)
    tensors = random_tensors(parameters)
    if kind == "tied":
        recipe = "none" if recipe == "mxfp4" else recipe
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    source = DummySource(parameters, "bfloat16") if kind == "written" else TensorSource(tensors=tensors)
    for _ in range(2):  # kernels that are compiled the first time may take memory of their own
        ledger = Ledger()
        plan, loaded, peak_bytes, held_bytes = load_watched(parameters, source, RECIPES[recipe], ledger)
        report = loaded.report
        if _ == 0:
            del loaded
    assert plan.final_bytes <= held_bytes < plan.final_bytes + GRANULE_BYTES
    assert ledger.total_bytes == plan.final_bytes
    assert peak_bytes <= plan.final_bytes + plan.staging_bytes("cuda") + GRANULE_BYTES
    assert plan.staging_bytes("cuda") < 64 * 2**20
    assert report.peak_allocated_bytes is not None
    assert report.peak_allocated_bytes >= peak_bytes


def test_gpu_load_allocates_nothing_while_chunks_stream():
    source = TensorSource(tensors=random_tensors((LARGE,)))
    counts = []

    def count(done, total):
        counts.append(torch.cuda.memory_stats()["allocation.all.allocated"])

    for recipe in RECIPES.values():
        load_watched((LARGE,), source, recipe, Ledger())  # compiles
        counts.clear()
        load_watched((LARGE,), source, recipe, Ledger(), count)
        assert len(set(counts)) == 1, recipe.scheme


@pytest.mark.parametrize("kind", ["read", "written"])
def test_gpu_load_stopped_frees_all_gpu_memory(kind):
    source = DummySource([LARGE], "bfloat16") if kind == "written" else TensorSource(tensors=random_tensors([LARGE]))
    ledger = Ledger()

    def stop(done, total):
        raise KeyboardInterrupt

    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    with pytest.raises(KeyboardInterrupt):
        load_watched([LARGE], source, AS_STORED, ledger, stop)
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == before
    assert list(ledger) == []


@pytest.mark.parametrize("num_loads", [3])
def test_gpu_load_report_splits_read_copy_and_place_time(num_loads):
    source = TensorSource(tensors=random_tensors((LARGE,)))
    for _ in range(num_loads):
        report = load_watched((LARGE,), source, RECIPES["fp8"], Ledger())[1].report
    assert 0 < report.copy_seconds < report.seconds
    assert 0 < report.place_seconds < report.seconds
    assert report.read_seconds > 0
    assert report.device_used_bytes is not None


def test_gpu_load_without_room_is_refused_with_the_size():
    huge = Parameter("huge.weight", (2**21, 2**20), (Part("huge", 0, (2**21, 2**20)),))
    source = DummySource([huge], "bfloat16")
    with raises_code("weights.no_memory", MemoryPlanError, needed="4096.00 GiB"):
        load_weights(plan_load([huge], source, "bfloat16"), source, "cuda", Ledger(), silent)
