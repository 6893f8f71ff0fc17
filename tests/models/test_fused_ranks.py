"""The fused decode path of ranks that share layers, and of stages: logits of the ordinary way on the same ranks and on one, and x the same on all ranks to the bit.

Ranks are lock-step threads, built as an engine builds them. The path runs on the plain-torch references of its kernels, and in a
few cases on the kernels themselves: in the interpreter in float32, on a GPU in bfloat16.
"""

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from distributed.lock_step import LockStep
from holdfast.distributed.mesh import ALONE, Mesh, meshes
from holdfast.models import activations, decoder_declaration
from holdfast.models.layer_stack import LayerStack
from holdfast.request.sampling_params import SamplingParams
from holdfast.request.sequence import LiveStep, ScheduledSequence, Sequence
from holdfast.runner import assembly
from kernels.exactness import require_native
from kernels.triton_cases import QUIET
from models.fused_decode_steps import use_references
from runner.rank_runs import NUM_PAGES, Built, build_rank, plan_rank, write_model

slow = pytest.mark.slow
NUM_STEPS = 3
ROUNDING = 3e-5
"""For logits around one in float32, after some layers."""
NUM_TOKENS = 9
PAGES = 3
"""That a sequence takes at most of each group: sixteen sequences have pages for it, and eight where there are two groups."""
WIDE: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 128,
}
"""A rank of four still has widths that the path takes."""
LATENT = {"num_key_value_heads": 8, "head_dim": None, "q_lora_rank": 64, "kv_lora_rank": 48, "v_head_dim": 32}
OPTIONS = {"max_num_seqs": 16, "max_num_batched_tokens": 96}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {},
    "qwen2_moe": {"shared_expert_intermediate_size": 64},
    "gpt_oss": {},
    "deepseek_v3": LATENT | {"qk_nope_head_dim": 48},
    "qwen3_5": {"linear_value_head_dim": 16},
    "qwen3_next": {"linear_value_head_dim": 16, "shared_expert_intermediate_size": 64},
}


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The path is taken as on a GPU in bfloat16, whatever device and type it is for; rank and rows of each step that took it."""
    takes, seen, run = activations.takes_fused_decode, [], LayerStack.fused_logits

    def noted(self: Any, batch: Any, *others: Any) -> torch.Tensor:
        seen.append((0 if self._exchange is None else self._exchange.rank, batch.num_rows))
        return run(self, batch, *others)

    for module in (assembly, decoder_declaration):
        monkeypatch.setattr(
            module, "takes_fused_decode", lambda spec, _, __, recipe: takes(spec, "bfloat16", "cuda", recipe)
        )
    monkeypatch.setattr(LayerStack, "fused_logits", noted)
    return seen


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    require_native()
    return tmp_path_factory.mktemp("fused ranks")


class Ranks:
    """Some ranks, built together; they compute one at a time, because the interpreter of kernels is one."""

    def __init__(self, path: Path, ranks: tuple[Mesh, ...], **options: Any) -> None:
        options = OPTIONS | options
        if ranks[0].num_stages > 1:
            options["pipeline_parallel_size"] = ranks[0].num_stages
        needs = plan_rank(path, options, ranks[0])[-1].exchange_needs
        self._steps = LockStep(ranks, needs, is_serial=True)
        self.built: list[Built] = self._steps.run(
            lambda mesh, exchange: build_rank(path, options, mesh, None if mesh == ALONE else exchange)
        )

    def decode(self, num_rows: int, fused: bool) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Whole logits of every step, [steps, rows, V], and of each rank the streams behind the layers of its stage."""
        found = self._steps.run(lambda mesh, _: decode(self.built[mesh.rank], num_rows, fused))
        last = [logits for (logits, _), built in zip(found, self.built, strict=True) if built.mesh.is_last_stage]
        return torch.cat(last, dim=-1), [streams for _, streams in found]

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        for one in self.built:
            one.build.release()


def steps_of(built: Built, num_rows: int) -> Iterator[LiveStep]:
    """Prompts of different lengths, then decode steps of all of them; pages are written anew."""
    runner, pages, sequences = built.runner, count(), []
    for index in range(num_rows):
        ids = torch.randint(
            3, runner.vocab_size, (NUM_TOKENS,), generator=torch.Generator().manual_seed(index)
        ).tolist()
        length = 1 + index % 4
        tables = [[next(pages) for _ in range(group.pages_for(NUM_TOKENS))] for group in runner.groups]
        sequence = Sequence(index, ids[:length], length, SamplingParams(), seed=0, max_tokens=8, tables=tables)
        sequence.slot = index
        sequences.append((sequence, ids))
    assert next(pages) <= NUM_PAGES, "pages are those of others"
    yield LiveStep(tuple(ScheduledSequence.of(one, 0, one.num_tokens) for one, _ in sequences))
    for _ in range(NUM_STEPS):
        for sequence, ids in sequences:
            sequence.token_ids.append(ids[sequence.num_tokens])
        yield LiveStep(tuple(ScheduledSequence.of(one, one.num_tokens - 1, 1) for one, _ in sequences))


@torch.inference_mode()
def decode(built: Built, num_rows: int, fused: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """A rank's share of the logits of decode steps, and x behind its layers."""
    runner, logits, streams = built.runner, [], []
    model: Any = runner.model
    for number, step in enumerate(steps_of(built, num_rows)):
        rows = list(range(step.num_tokens))
        batch = runner.buffers.fill(step, rows, step.num_tokens, len(rows))
        plan = runner.backend.plan(batch)
        if fused and number:
            found_TV = model.step_logits(batch, plan)
        else:
            found_TV = model.hidden(batch, plan)
            found_TV = model.logits(found_TV) if built.mesh.is_last_stage else found_TV
        if number:
            logits.append(found_TV.clone())
            streams.append(model.acquire(model.requests(batch.num_rows).stream)["x"].clone())
        if built.exchange is not None:
            built.exchange.end_step()
    return torch.stack(logits), torch.stack(streams)


def assert_near(found: torch.Tensor, wanted: torch.Tensor, most: float = ROUNDING) -> None:
    assert found.shape == wanted.shape
    assert found.isfinite().all(), "a logit is no number"
    assert wanted.std() > 0.1, "errors are to be small beside it"
    assert float((found - wanted).abs().max()) < most


QUICK = [
    ("llama", 2, False),
    ("qwen2", 4, False),
    ("qwen3_moe", 2, True),
    ("deepseek_v3", 2, False),
    ("qwen3_next", 2, False),
]
MORE = [
    ("llama", 4, False),
    ("qwen2", 2, False),
    ("qwen3", 2, False),
    ("qwen3", 4, False),
    ("qwen3_moe", 2, False),
    ("qwen3_moe", 4, True),
    ("qwen2_moe", 2, True),
    ("qwen2_moe", 2, False),
    ("gpt_oss", 2, False),
    ("gpt_oss", 4, True),
    ("deepseek_v3", 2, True),
    ("deepseek_v3", 4, False),
    ("qwen3_5", 2, False),
    ("qwen3_next", 2, True),
]


def check_logits(path: Path, own: tuple[Mesh, ...], counts: tuple[int, ...], taken: list[tuple[int, int]]) -> None:
    """For steps of so many rows, or of as many as there are pages for."""
    with Ranks(path, own) as ranks, Ranks(path, (ALONE,)) as one:
        most = NUM_PAGES // (len(ranks.built[0].runner.groups) * PAGES)
        for num_rows in (min(most, count) for count in counts):
            ordinary, _ = ranks.decode(num_rows, fused=False)
            assert not taken
            found, streams = ranks.decode(num_rows, fused=True)
            assert sorted(taken) == [(rank, num_rows) for rank in range(len(own)) for _ in range(NUM_STEPS)]
            assert_near(found, ordinary)
            assert_near(found, one.decode(num_rows, fused=False)[0])
            assert_near(found, one.decode(num_rows, fused=True)[0])
            assert all(torch.equal(streams[0], others) for others in streams[1:]), "ranks differ from each other"
            taken.clear()


@pytest.mark.parametrize(("name", "num_ranks", "whole_experts"), QUICK)
def test_logits_are_those_of_the_ordinary_way(folder, monkeypatch, taken, name, num_ranks, whole_experts):
    use_references(monkeypatch)
    path = write_model(folder / name, name, **WIDE | MODELS[name])
    check_logits(path, meshes(num_ranks, has_expert_parallelism=whole_experts), (1, 5), taken)


@slow
@pytest.mark.parametrize(("name", "num_ranks", "whole_experts"), [*QUICK, *MORE])
def test_fused_ranks_every_family_matches_unfused(folder, monkeypatch, taken, name, num_ranks, whole_experts):
    use_references(monkeypatch)
    path = write_model(folder / name, name, **WIDE | MODELS[name])
    check_logits(path, meshes(num_ranks, has_expert_parallelism=whole_experts), (1, 2, 5, 16), taken)


@pytest.mark.parametrize("scheme", ["fp8", pytest.param("int8", marks=slow)])
@pytest.mark.parametrize(
    ("name", "num_ranks", "whole_experts"),
    [
        pytest.param("qwen3", 2, False),
        pytest.param("llama", 4, False, marks=slow),
        pytest.param("qwen3_moe", 2, True, marks=slow),
        pytest.param("qwen3_moe", 2, False, marks=slow),
    ],
)
def test_eight_bits_with_scales_by_row(folder, monkeypatch, taken, scheme, name, num_ranks, whole_experts):
    """A rank's codes follow from its own columns on both ways, so that most numbers are the same: see models/test_fused_decode.py."""
    use_references(monkeypatch)
    path = write_model(folder / name, name, **WIDE | MODELS[name])
    own = meshes(num_ranks, has_expert_parallelism=whole_experts)
    options = {"quantization": scheme, "quantized_embeddings": "all"}
    with Ranks(path, own, **options) as ranks, Ranks(path, own) as plain:
        off, noise = [], []
        for num_rows in (1, 5):
            ordinary, _ = ranks.decode(num_rows, fused=False)
            found, streams = ranks.decode(num_rows, fused=True)
            assert len(taken) == num_ranks * NUM_STEPS
            taken.clear()
            off.append((found - ordinary).abs().amax(-1).flatten())
            noise.append((plain.decode(num_rows, fused=False)[0] - ordinary).abs().amax(-1).flatten())
            assert all(torch.equal(streams[0], others) for others in streams[1:]), "ranks differ from each other"
        if scheme == "int8":
            assert torch.cat(off).max() < ROUNDING
            return
        assert torch.cat(off).median() < ROUNDING, "codes are others"
        assert torch.cat(noise).min() > 100 * ROUNDING, "inputs are not quantized at all"
        assert torch.cat(off).max() < 0.25 * torch.cat(noise).median(), "more than a number between two codes"


@pytest.mark.parametrize(
    ("name", "num_ranks", "cuts"),
    [
        ("llama", 1, [(0, 1), (1, 3)]),
        pytest.param("qwen3_moe", 2, [(0, 2), (2, 3)], marks=slow),
        pytest.param("deepseek_v3", 1, [(0, 1), (1, 2), (2, 3)], marks=slow),
    ],
)
def test_stages_take_it_each_for_itself(folder, monkeypatch, taken, name, num_ranks, cuts):
    use_references(monkeypatch)
    path = write_model(folder / f"{name} of three", name, **WIDE | MODELS[name] | {"num_hidden_layers": 3})
    with Ranks(path, meshes(num_ranks, cuts)) as ranks, Ranks(path, (ALONE,)) as one:
        for num_rows in (1, 5):
            found, streams = ranks.decode(num_rows, fused=True)
            assert len(taken) == len(ranks.built) * NUM_STEPS
            assert_near(found, ranks.decode(num_rows, fused=False)[0])
            assert_near(found, one.decode(num_rows, fused=True)[0])
            taken.clear()
            for stage in range(len(cuts)):
                first, *others = streams[stage * num_ranks : (stage + 1) * num_ranks]
                assert all(torch.equal(first, other) for other in others)


def test_ranks_that_gather_keep_the_products_of_one(folder, taken):
    """Neither planned nor taken; and where it is requested for all the same, declined as text."""
    path = write_model(folder / "llama", "llama", **WIDE | MODELS["llama"])
    with Ranks(path, meshes(2, is_exact=True)) as ranks:
        for built in ranks.built:
            model: Any = built.runner.model
            assert model.fused is None
            assert "ranks gather (exact)" in (model.fused_decode_declined() or "")
            assert activations.FUSED_DECODE not in model.workspace.lanes
        ranks.decode(2, fused=True)
        assert not taken


@QUIET
@pytest.mark.parametrize(
    ("name", "num_ranks", "num_rows"),
    [
        ("qwen2", 2, 1),
        pytest.param("qwen2", 2, 3, marks=slow),
        pytest.param("qwen3_moe", 2, 3, marks=slow),
    ],
)
def test_fused_decode_with_real_kernels_matches_unfused(folder, monkeypatch, taken, name, num_ranks, num_rows):
    """In the interpreter, those of the path; attention and experts are plain torch."""
    small = {"num_hidden_layers": 1, "vocab_size": 40, "intermediate_size": 128}
    path = write_model(folder / f"small {name}", name, **WIDE | MODELS[name] | small)
    monkeypatch.setattr("holdfast.kernels.exchange.add_rows.can_run", lambda tensor: True)
    with Ranks(path, meshes(num_ranks)) as ranks:
        found, streams = ranks.decode(num_rows, fused=True)
        assert len(taken) == num_ranks * NUM_STEPS
        assert_near(found, ranks.decode(num_rows, fused=False)[0])
        assert all(torch.equal(streams[0], others) for others in streams[1:])
