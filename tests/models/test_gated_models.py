"""Models with RoPE on part of each head and output gates, against transformers: whole, chunked, in company, over every format."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from api.greedy_answers import answer_greedily, generate_greedily
from for_each import for_each
from holdfast.api.llm import LLM
from holdfast.cache.spec import mixed_cache
from holdfast.distributed.mesh import ALONE
from holdfast.families.grouped.declarations import TritonPagedDeclaration, declined_lane
from holdfast.models import grouped_readers
from holdfast.models.activations import takes_fused_decode
from holdfast.models.blueprints import read
from holdfast.models.declared_model import declare_decoder
from holdfast.quant.formats import KV_FORMATS
from kernels.exactness import require_native, same_bits
from loading import tiny_models
from models import gated_models
from models.fused_decode_steps import decode, make_rig, use_references
from models.test_decoder import judge, make_drive, make_requests, theirs_logits
from runner import rank_runs
from runner.drive import LoadedModel, load_model

NUM_STEPS = 8


@pytest.fixture(scope="module", autouse=True)
def known() -> Iterator[None]:
    """Both libraries' names of these models."""
    with pytest.MonkeyPatch.context() as patch:
        for name, own in gated_models.MODELS.items():
            patch.setitem(tiny_models.FAMILIES, name, own)
        for name, own in gated_models.CONFIGS.items():
            patch.setitem(tiny_models.CONFIGS, name, own)
        for name, own in gated_models.families().items():
            patch.setitem(grouped_readers.FAMILIES, name, own)  # type: ignore[arg-type]
        runs = gated_models.families()
        patch.setattr(read, "PLANNED_FAMILIES", tuple(name for name in read.PLANNED_FAMILIES if name not in runs))
        yield


@pytest.fixture(scope="module")
def models(known: None) -> Any:
    """(transformers' model, ours, its folder) by name, each made once."""
    made: dict[str, tuple[Any, LoadedModel, Path]] = {}
    with TemporaryDirectory() as folder:

        def get(name: str) -> tuple[Any, LoadedModel, Path]:
            if name not in made:
                path = Path(folder) / name
                path.mkdir()
                made[name] = (tiny_models.save_tiny(name, path), load_model(path), path)
            return made[name]

        yield get


@pytest.fixture(params=["native_paged", "torch_paged"])
def backend(request, monkeypatch):
    """All in C, or all in torch."""
    if request.param == "native_paged":
        require_native()
    else:
        monkeypatch.setattr("holdfast.kernels.native_library.native_library", lambda: None)
    return request.param


@pytest.mark.parametrize("name", gated_models.MODELS)
def test_gated_models_whole_texts_match_transformers(models, name, backend):
    theirs, ours, _ = models(name)
    for request in make_requests((1, 90), NUM_STEPS):
        drive = make_drive(ours, backend, max_num_batched_tokens=128)
        drive.run([request])
        judge(theirs, drive, request)


@for_each("name", gated_models.MODELS)
def test_gated_models_chunks_in_company_match_transformers(models, name, backend):
    """Steps with several sequences, of which only last rows are finished: gates follow their rows."""
    theirs, ours, _ = models(name)
    requests = make_requests(num_steps=NUM_STEPS)
    drive = make_drive(ours, backend, max_num_batched_tokens=24, page_tokens=8)
    drive.run(requests)
    for request in requests:
        judge(theirs, drive, request)


def test_gated_models_finish_only_wanted_rows(models):
    """Without prompt logits the last layer attends with one row of a chunk: its gate is that row's."""
    theirs, ours, _ = models("gated")
    (request,) = make_requests((33,), NUM_STEPS)
    request.params = request.params.__class__(temperature=0.0)
    drive = make_drive(ours, "native_paged", max_num_batched_tokens=20)
    drive.run([request])
    expected = theirs_logits(theirs, (*request.prompt, *request.output))
    assert len(drive.logits(request)) == NUM_STEPS
    for position, row in drive.logits(request).items():
        assert float((row - expected[position]).abs().max()) <= 1e-4


PROMPTS = [[(7 * number + 5 * place * place) % 250 + 3 for place in range(5 + 60 * number)] for number in range(3)]


def open_llm(folder: Path, **options: Any) -> LLM:
    return LLM(model=str(folder), dtype="float32", max_model_len=192, device="cpu", **options)


@for_each("name", ["gated", "gated next"])
def test_gated_llm_answers_like_transformers(models, name):
    """Short steps, several at once, prefix hits of the second round; the plan is the ledger."""
    theirs, _, folder = models(name)
    wanted = [generate_greedily(theirs, prompt, NUM_STEPS) for prompt in PROMPTS]
    llm = open_llm(folder, tokenizer="none", max_num_batched_tokens=32, max_num_seqs=4, page_tokens=8)
    for _ in range(2):
        assert answer_greedily(llm, PROMPTS, NUM_STEPS) == wanted


NEAR = {"kv_near_tokens": 64, "page_tokens": 64, "kv_protected_layers": 0}


@for_each("kv_format", ["turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc"])
@for_each("name", ["gated wide", "gated biases"])
def test_gated_llm_near_tokens_are_exact(models, name, kv_format):
    """Within a block of near tokens answers are those of plain pages, whatever mean and scale codes leave out."""
    theirs, _, folder = models(name)
    llm = open_llm(folder, tokenizer="none", kv_cache_dtype=kv_format, **NEAR)
    assert answer_greedily(llm, PROMPTS[:1], 16) == [generate_greedily(theirs, PROMPTS[0], 16)]


def test_gated_wide_heads_are_taken_by_every_backend(models):
    """head_dim 256 with codes, near rows and the lane: only the type and the GPU decide."""
    _, ours, _ = models("gated wide")
    geometry = declare_decoder(ours.spec, "tiny").declaration.heads(ALONE)
    for name in (
        "bfloat16",
        "fp8",
        "turboquant_k8v4",
        "turboquant_4bit_nc",
        "turboquant_k3v4_nc",
        "turboquant_3bit_nc",
    ):
        cache = mixed_cache((KV_FORMATS[name],) * 2, 1, 256, 16)
        spec = geometry.attention_spec(cache.layers[0], 0, 4096, "bfloat16", "cuda")
        assert spec.has_output_gate
        assert TritonPagedDeclaration().unsupported(spec) is None, name
        if name != "bfloat16":
            assert declined_lane(spec, (9, 0), batch_invariant=False) is None, name


def test_gated_fused_decode_equals_ordinary_path(models, monkeypatch):
    """With gates after query heads, RoPE on a part of them, and norms of 1 + w."""
    _, model, _ = models("gated")
    assert takes_fused_decode(replace(model.spec, intermediate_size=128), "bfloat16", "cuda")
    use_references(monkeypatch)
    for num_rows in (1, 5):
        wanted = decode(make_rig(model, fused=False), num_rows)
        found = decode(make_rig(model), num_rows)
        assert float((found - wanted).abs().max()) < 2e-5
        assert float(wanted.std()) > 0.1


RANKED = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "num_key_value_heads": 2,
    "attention_bias": True,
    "layer_types": gated_models.LAYERS,
    "rope_parameters": gated_models.rope(0.25),
}


@for_each("num_ranks, kv_format", [(2, "auto"), (4, "auto"), (2, "turboquant_4bit_nc")])
def test_gated_heads_are_shared_with_their_gates(tmp_path, monkeypatch, num_ranks, kv_format):
    """Ranks that gather have the bits of one rank, those that sum are near; two key heads for up to four ranks."""
    require_native()
    monkeypatch.setitem(rank_runs.MODELS, "gated", RANKED)
    path = rank_runs.write_model(tmp_path / f"{num_ranks} {kv_format}", "gated")
    options = {"kv_cache_dtype": kv_format}
    expected = rank_runs.run_steps(rank_runs.one_rank(path, **options)).logits
    # Sums in another order choose other codes.
    for is_exact in (True, False) if kv_format == "auto" else (True,):
        ranks = rank_runs.Ranks(path, num_ranks, exact=is_exact, **options)
        for found, wanted in zip(rank_runs.whole_logits(ranks.run(rank_runs.run_steps)), expected, strict=True):
            assert wanted.abs().max() > 0.1, "weights that do nothing"
            assert same_bits(found, wanted) if is_exact else float((found - wanted).abs().max()) < 1e-4, f"{is_exact=}"
