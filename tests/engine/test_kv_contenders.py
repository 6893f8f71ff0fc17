"""Contenders: what is settled for a window, which formats a model can have, and which layers are protected in them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from holdfast.config import EngineConfig
from holdfast.errors import ConfigError
from holdfast.eval.kv_quality import (
    CHUNK_TOKENS,
    Entry,
    format_entry,
    narrower_formats,
    open_contenders,
    reference_entry,
    settle_config,
)
from holdfast.loading.model_files import open_model
from holdfast.loading.planning.open_model import OpenModel
from holdfast.quant.formats import KV_FORMATS
from loading.tiny_models import save_tiny

CODED = [name for name, kv_format in KV_FORMATS.items() if kv_format.is_coded]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    made = {}
    for family in ("llama", "llama_bias", "opt"):
        made[family] = tmp_path_factory.mktemp(family)
        save_tiny(family, made[family])
    return made


@contextmanager
def model_of(folder: Path) -> Iterator[OpenModel]:
    model = open_model(str(folder), "auto")
    try:
        yield model
    finally:
        model.source.close()


def test_a_config_is_settled_for_one_window(folders) -> None:
    with model_of(folders["llama"]) as model:
        config = settle_config(EngineConfig(device="cpu"), model, 2048)
        assert (config.dtype, config.device) == ("float32", "cpu")
        assert (config.max_model_len, config.max_num_seqs) == (2048, 1)
        assert config.max_num_batched_tokens == CHUNK_TOKENS
        assert config.enforce_eager
        short = settle_config(EngineConfig(device="cpu", max_num_batched_tokens=300), model, 100)
        assert short.max_num_batched_tokens == 100
        longer = settle_config(EngineConfig(device="cpu", max_num_batched_tokens=900, dtype="bfloat16"), model, 2048)
        assert (longer.max_num_batched_tokens, longer.dtype) == (900, "bfloat16")


def test_a_window_beyond_learned_positions_is_refused(folders) -> None:
    with model_of(folders["opt"]) as model, pytest.raises(ConfigError, match="the model has learned 256 positions"):
        settle_config(EngineConfig(device="cpu"), model, 257)


@pytest.mark.parametrize(("dtype", "plain"), [("float32", ["float16", "bfloat16"]), ("bfloat16", [])])
def test_formats_below_the_dtype_are_taken(folders, dtype: str, plain: list[str]) -> None:
    with model_of(folders["llama"]) as model:
        config = settle_config(EngineConfig(device="cpu", dtype=dtype), model, 64)
        choice = narrower_formats(config, model)
    assert list(choice.names) == [*plain, *CODED]
    assert choice.left_out == {}


def test_a_format_that_a_model_cannot_have_is_left_out_with_the_reason(folders) -> None:
    with model_of(folders["llama_bias"]) as model:
        config = settle_config(EngineConfig(device="cpu"), model, 64)
        choice = narrower_formats(config, model)
    assert list(choice.names) == ["float16", "bfloat16"]
    assert list(choice.left_out) == CODED
    assert all("24" in reason for reason in choice.left_out.values()), choice.left_out


@pytest.mark.parametrize("asked", [None, 0, 1, "0,1"])
def test_protection_is_for_formats_below_what_protects(folders, asked: int | str | None) -> None:
    with model_of(folders["llama"]) as model:
        config = settle_config(EngineConfig(device="cpu", kv_protected_layers=asked), model, 64)
        entries = {name: format_entry(config, model, name) for name in ("float16", *CODED)}
        reference = reference_entry(config)
        assert set(narrower_formats(config, model).names) >= set(CODED)
    given = {name: entry.variant.config.kv_protected_layers for name, entry in entries.items()}
    assert given == {"float16": None, "fp8": None} | {name: asked for name in CODED if name != "fp8"}
    assert reference.variant.config.kv_protected_layers is None
    assert reference.name == reference.variant.config.kv_cache_dtype == "float32"


def test_protection_in_the_dtype_reaches_eight_bits_too(folders) -> None:
    with model_of(folders["llama"]) as model:
        asked = EngineConfig(device="cpu", kv_protected_layers=1, kv_protected_dtype="auto")
        config = settle_config(asked, model, 64)
        assert format_entry(config, model, "fp8").variant.config.kv_protected_layers == 1
        opened = open_contenders([reference_entry(config), format_entry(config, model, "fp8")], model, lambda *_: None)
    heads, head_dim = 2, 16
    assert [contender.note for contender in opened.contenders] == ["", "layers 0, in float32"]
    assert opened.contenders[1].size_bytes == heads * 2 * (head_dim + 2) + heads * 2 * head_dim * 4
    opened.release()


def test_an_entry_may_say_its_own_bytes(folders) -> None:
    with model_of(folders["llama"]) as model:
        config = settle_config(EngineConfig(device="cpu"), model, 64)
        reference = reference_entry(config)
        entries = [
            reference,
            Entry("another", reference.variant, reference.bytes_per_token),
            reference._replace(name="x"),
        ]
        entries[1] = entries[1]._replace(bytes_per_token=77, note="odd")  # type: ignore[arg-type]
        opened = open_contenders(entries, model, lambda *_: None)
    assert [contender.name for contender in opened.contenders] == ["float32", "another", "x"]
    assert [contender.size_bytes for contender in opened.contenders] == [512, 77, 512]
    assert opened.contenders[1].note == "odd"
    assert opened.plain_bytes_per_token == 256
    opened.release()
