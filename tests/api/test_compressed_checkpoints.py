"""Checkpoints of DeepSeek-V4 as they are shipped, through LLM: planned bytes are held; experts in MXFP4 answer as the numbers that they stand for."""

from pathlib import Path
from typing import Any

import pytest
import torch

from cli.cli_models import write_tokenizer
from error_codes import raises_code
from holdfast.api.llm import LLM
from holdfast.errors import ModelFormatError
from holdfast.request.sampling_params import SamplingParams
from loading.compressed_models import BASE, CONFIG, FLASH, numbers, stored_as, tensors_of, with_drafts
from loading.latent_models import write_folder

PROMPTS = [[(7 * number + 5 * place * place) % 36 + 3 for place in range(3 + 40 * number)] for number in range(3)]


def opened(folder: Path, **options: Any) -> LLM:
    return LLM(model=str(folder), dtype="float32", page_tokens=1, max_model_len=256, max_num_seqs=3, **options)


def answers(llm: LLM) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params)
    return [list(output.outputs[0].token_ids) for output in outputs]


def written(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    write_folder(folder, config, tensors)
    write_tokenizer(folder)
    return folder


@pytest.mark.parametrize(
    "config",
    [pytest.param(FLASH, id="MXFP4 experts"), pytest.param(BASE, id="fp8 experts", marks=pytest.mark.slow)],
)
def test_llm_deepseek_v4_checkpoint_holds_planned_bytes(config: dict[str, Any], tmp_path: Path) -> None:
    folder = written(tmp_path / "m", config, with_drafts(stored_as(config, tensors_of(config))))
    llm = opened(folder, device="cpu")
    found = answers(llm)
    assert all(0 <= token < 40 for tokens in found for token in tokens)
    assert answers(llm) == found, "on pages that were kept"
    rows = {row.owner: row for row in llm.memory.rows}
    for owner, row in rows.items():
        assert owner.partition("/")[0] != "weights" or row.held_bytes == row.planned_bytes, owner


def test_llm_mxfp4_experts_match_their_dequantized_values(tmp_path: Path) -> None:
    """Other matrices are plain here: those in fp8 would take their inputs as e4m3."""
    stored = stored_as(FLASH, tensors_of(FLASH))
    plain = {name: numbers(stored, name) for name in stored if not name.endswith(".scale")}
    experts = {name: tensor for name, tensor in stored.items() if ".experts." in name}
    some = {name: tensor for name, tensor in plain.items() if name not in experts}
    coded = written(tmp_path / "coded", FLASH, some | experts)
    same = written(tmp_path / "plain", CONFIG, plain)
    assert answers(opened(coded, device="cpu")) == answers(opened(same, device="cpu"))


def test_llm_hash_table_with_unknown_expert_is_refused(tmp_path: Path) -> None:
    tensors = tensors_of(CONFIG)
    tensors["layers.0.ffn.gate.tid2eid"][7, 0] = 3
    folder = written(tmp_path / "m", CONFIG, tensors)
    with raises_code("weights.wrong_expert", ModelFormatError, expert=3, row=7, count=3):
        opened(folder, device="cpu")
