"""DeepSeek V3.2 with its index in fp8: a whole model against transformers, whose indexer chooses by codes of e4m3 here; what the codes cost the choice."""

from collections import defaultdict
from typing import Any

import pytest
import torch

from holdfast.config import Limits
from holdfast.families.sparse import torch_backend as torch_sparse
from holdfast.kernels.latent import (
    index_scores,
    top_k_tokens,
    write_index,
    write_latent,
)
from models.tiny_latents import LATENT_MODELS, LEAST_GAP, TOLERANCE, make_request, tiny
from runner.drive import Drive, Request, Rig

CASES = [case for case, (prefix, _) in LATENT_MODELS.items() if prefix == "DeepseekV32"]
V32 = CASES[0]
CODED_GAP = 3e-4
"""Between the last token that is chosen and the first that is not, in what is judged here: float32 moves scores of the same codes by
1e-6, and a code that falls to the other side of a rounding moves one by 1e-4."""


def coded(x: torch.Tensor, least: float) -> torch.Tensor:
    """What e4m3 with a power of two for each last dimension leaves of numbers."""
    scale = torch.exp2(torch.ceil(torch.log2(x.abs().amax(-1, keepdim=True).clamp(min=least) / 448)))
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


class CodedOracle:
    """transformers' model, the queries and keys of whose indexers go through e4m3, and whose latents go through the type of pages."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from transformers.models.deepseek_v32 import modeling_deepseek_v32 as modeling

        self.latents = torch.float32
        self.least_gap = torch.inf
        self.same: dict[int, list[float]] = defaultdict(list)
        """By layer, of each row that chooses: the share of its tokens that exact scores choose too."""
        rotate = modeling.apply_rotary_pos_emb_interleave

        def rotate_kept(q: torch.Tensor, k: torch.Tensor, *table: Any) -> tuple[torch.Tensor, torch.Tensor]:
            q, k = rotate(q, k, *table)
            return q, k.to(self.latents).float()

        def choose(own: Any, hidden: Any, q_resid: Any, table: Any, mask: Any, *_: Any, **__: Any) -> torch.Tensor:
            rope_dim = own.qk_rope_head_dim
            q = own.wq_b(q_resid).unflatten(-1, (own.n_heads, own.head_dim))
            k = own.k_norm(own.wk(hidden)).unsqueeze(2)
            turned = modeling.apply_rotary_pos_emb(q[..., :rope_dim], k[..., :rope_dim], *table, unsqueeze_dim=2)
            q, k = (torch.cat((first, x[..., rope_dim:]), -1)[0] for first, x in zip(turned, (q, k), strict=True))
            weights = own.weights_proj(hidden)[0]
            exact, by_codes = (
                (torch.einsum("shd,td->sht", q, k[:, 0]).relu() * weights.unsqueeze(2)).sum(1)
                for q, k in ((q, k), (coded(q, 1e-10), coded(k, 1e-4)))
            )
            is_seen = torch.ones_like(exact, dtype=torch.bool).tril()
            return self._chosen(own, *(scores.masked_fill(~is_seen, -torch.inf) for scores in (exact, by_codes)))

        monkeypatch.setattr(modeling, "apply_rotary_pos_emb_interleave", rotate_kept)
        monkeypatch.setattr(modeling.DeepseekV32Indexer, "forward", choose)
        monkeypatch.setattr(modeling.DeepseekV32RMSNorm, "forward", self._keeping(modeling.DeepseekV32RMSNorm.forward))

    def _keeping(self, norm: Any) -> Any:
        def normed(own: Any, x: torch.Tensor) -> torch.Tensor:
            is_latent = own.weight.shape[0] == 32
            return norm(own, x).to(self.latents).float() if is_latent else norm(own, x)

        return normed

    def _chosen(self, own: Any, exact: torch.Tensor, by_codes: torch.Tensor) -> torch.Tensor:
        count = min(own.index_topk, len(exact))
        chosen = by_codes.topk(count).indices
        for row in range(count, len(exact)):
            inside, outside = by_codes[row].topk(count + 1).values[-2:].tolist()
            self.least_gap = min(self.least_gap, (inside - outside) * own.softmax_scale * own.n_heads**-0.5)
            both = set(chosen[row].tolist()) & set(exact[row].topk(count).indices.tolist())
            self.same[own.layer_idx].append(len(both) / count)
        return chosen.int().unsqueeze(0)

    @torch.no_grad()
    def moved(self, theirs: Any, drive: Drive, request: Request) -> float:
        """The most that a logit of a prompt is from theirs."""
        expected = theirs(torch.tensor([request.prompt])).logits[0]
        logits = drive.logits(request)
        return max(float((logits[position] - row).abs().max()) for position, row in enumerate(expected))

    @torch.no_grad()
    def judge(self, theirs: Any, drive: Drive, request: Request, tolerance: float) -> None:
        """Every logit that was computed is theirs, and every token the most likely there."""
        token_ids = (*request.prompt, *request.output)
        expected = theirs(torch.tensor([token_ids])).logits[0][:-1]
        logits = drive.logits(request)
        assert set(logits) == set(range(len(expected)))
        for position, row in logits.items():
            assert float((row - expected[position]).abs().max()) <= tolerance, f"{position=}"
        behind_prompt = expected[len(request.prompt) - 1 :]
        assert request.output == behind_prompt.argmax(-1).tolist()
        best, second = behind_prompt.topk(2).values.unbind(-1)
        assert float((best - second).min()) > max(LEAST_GAP, tolerance), "a tie: take another prompt"


@pytest.fixture
def oracle(monkeypatch: pytest.MonkeyPatch) -> CodedOracle:
    return CodedOracle(monkeypatch)


def drive_of(
    case: str, max_rows: int = 96, latents: str = "float32", backend: str = "torch_sparse", index: str = "fp8"
) -> Drive:
    limits = Limits(4, max_rows, 96, page_tokens=4)
    return Drive(Rig(tiny(case)[1], backend, limits, 100, kv_dtype=latents, index_dtype=index), 100)


@pytest.mark.each_value
@pytest.mark.parametrize("latents", ["float32", "float16"])
@pytest.mark.parametrize("case", CASES)
def test_fp8_index_whole_model_matches_coded_transformers(case: str, latents: str, oracle: CodedOracle) -> None:
    """In company and in chunks."""
    theirs, oracle.latents = tiny(case)[0], getattr(torch, latents)
    requests = [make_request(length, 8, index) for index, length in enumerate((3, 17, 33))]
    drive = drive_of(case, 11, latents)
    drive.run(requests)
    for request in requests:
        oracle.judge(theirs, drive, request, TOLERANCE if latents == "float32" else 1e-3)
    assert oracle.least_gap > CODED_GAP, "a rounding could decide: take other prompts"


def test_fp8_index_triton_kernels_match_coded_transformers(
    oracle: CodedOracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys are written, queries coded, tokens scored and selected, and attended to, by the kernels themselves."""
    operations = (index_scores.index_scores, top_k_tokens.top_k_tokens, write_latent.write_latent)
    for one in (*operations, write_index.write_index, write_index.quantize_index_queries):
        monkeypatch.setattr(one, "reference", one.triton)
    drive, request = drive_of(V32, 6, backend="triton_sparse"), make_request(9, 2)
    drive.run([request])
    oracle.judge(tiny(V32)[0], drive, request, TOLERANCE)


def test_chunks_and_steps_of_one_row_give_the_same_tokens() -> None:
    whole, request = drive_of(V32), make_request(33, 8)
    whole.run([request])
    for max_rows in (1, 5, 16):
        drive, again = drive_of(V32, max_rows), make_request(33, 8)
        drive.run([again])
        assert again.output == request.output
        for position, row in drive.logits(again).items():
            assert float((row - whole.logits(request)[position]).abs().max()) <= TOLERANCE, f"{max_rows=}, {position=}"


def queries_as_they_are(q: torch.Tensor, weights: torch.Tensor, codes: torch.Tensor, out: torch.Tensor) -> None:
    """In the place of codes, in a type that holds them."""
    codes.data = q.float()
    out.copy_(weights)


def nearest_scale(x_XD: torch.Tensor, least: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes by a scale that is no power of two."""
    scales_X1 = x_XD.float().abs().amax(-1, keepdim=True).clamp(min=least) / 448
    return (x_XD.float() / scales_X1).to(torch.float8_e4m3fn), scales_X1


@pytest.mark.parametrize("reading", ["right", "exact scores", "another scale", "queries as they are"])
def test_fp8_index_planted_fault_exceeds_tolerance(
    reading: str, oracle: CodedOracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reading == "another scale":
        monkeypatch.setattr(write_index, "quantize_index", nearest_scale)
    if reading == "queries as they are":
        monkeypatch.setattr(torch_sparse, "quantize_index_queries", queries_as_they_are)
    drive = drive_of(V32, index="float32" if reading == "exact scores" else "fp8")
    request = make_request(61, 1)
    drive.run([request])
    moved = oracle.moved(tiny(V32)[0], drive, request)
    assert (moved <= TOLERANCE) if reading == "right" else (moved > 200 * TOLERANCE)


def test_codes_choose_almost_what_exact_scores_choose(oracle: CodedOracle) -> None:
    """In every layer of the model, of what this layer's own queries and keys would choose exactly."""
    for case in CASES:
        oracle.same.clear()
        theirs = tiny(case)[0]
        with torch.no_grad():
            for length in (61, 80, 96):
                theirs(torch.tensor([make_request(length, 0).prompt]))
        for layer, shares in oracle.same.items():
            mean = sum(shares) / len(shares)
            assert 0.93 < mean < 1.0, f"{case}, layer {layer}: {mean:.4f}"
