"""`holdfast quantize`: the whole command on tiny models, its table, its errors, and what the result answers."""

from pathlib import Path

import gguf
import pytest

from cli.cli_models import Here, make_model
from for_each import for_each
from holdfast.loading.model_files import open_directory, open_gguf
from holdfast.text.gguf_tokenizer import tokenizer_from_gguf
from holdfast.text.tokenizer import tokenizer_from_directory
from text.tokenizer_cases import write_folder

SIZES = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 256}


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokenizer GGUF files can hold."""
    folder = make_model(tmp_path_factory.mktemp("texts") / "model", **SIZES)
    return write_folder(folder, "byte_level")


def test_quantize_writes_a_file_that_opens_and_runs(here: Here, texts: Path, tmp_path: Path) -> None:
    out = tmp_path / "small.gguf"
    ended = here("quantize", texts, out, "--to", "q8_0")
    assert ended.code == 0, ended
    lines = ended.out.splitlines()
    assert lines[0].split() == ["tensors", "before", "after", "why"]
    assert lines[1].split()[:5] == ["16", "float32", "2.88", "MiB", "Q8_0"]
    assert lines[-1].split()[1:3] == ["in", "all"]
    assert f"to {out}, rounded to nearest" in ended.err
    fields = gguf.GGUFReader(out).fields
    assert fields["tokenizer.ggml.pre"].contents() == "gpt-2"
    assert fields["tokenizer.chat_template"].contents() == (texts / "chat_template.jinja").read_text()
    assert fields["general.file_type"].contents() == 7
    opened = open_gguf(out)
    assert opened.gguf is not None
    tokenizer = tokenizer_from_gguf(opened.gguf.metadata, "small.gguf")
    assert opened.generation.eos_token_ids == (tokenizer.eos_token_id,)
    text = "hello world, this is a test"
    assert tokenizer.encode(text) == tokenizer_from_directory(texts).encode(text)
    answered = here("run", out, "-p", "hello", "--raw", "--max-tokens", "2", "--device", "cpu", "--dtype", "float32")
    assert answered.code == 0, answered


@for_each("target", ["int4", "nvfp4"])
def test_quantize_writes_a_folder_with_its_tokenizer(
    here: Here, texts: Path, tmp_path_factory: pytest.TempPathFactory, target: str
) -> None:
    out = tmp_path_factory.mktemp("q") / "small"
    ended = here("quantize", texts, out, "--to", target)
    assert ended.code == 0, ended
    assert "the embedding" in ended.out
    names = {path.name for path in out.iterdir()}
    assert names >= {"config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"}
    assert {source.name for source in texts.iterdir()} == names
    assert open_directory(out).source.entries


def test_quantize_says_what_short_rows_are_stored_as(here: Here, tmp_path: Path) -> None:
    model = write_folder(make_model(tmp_path / "m", vocab_size=512), "byte_level")
    ended = here("quantize", model, tmp_path / "q.gguf", "--to", "q4_k")
    assert ended.code == 0, ended
    notes = [line for line in ended.err.splitlines() if "blocks do not divide" in line]
    assert len(notes) == 1
    assert notes[0].endswith("they are F16, Q5_0, Q8_0, as in llama.cpp")
    assert "rows of 112 are no blocks of 256" in ended.out


def test_quantize_refuses_wrong_command_lines(here: Here, texts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert here("quantize", "--to", "q8_0").refuses("cli.usage")
    assert here("quantize", texts, out).refuses("cli.usage")
    unknown = here("quantize", texts, out, "--to", "q3_k")
    assert unknown.refuses("value.not_one_of", name="--to", value="q3_k")
    assert unknown.code == 2
    assert "q4_k, q4_0, q8_0, int4, nvfp4" in unknown.err
    assert here("quantize", texts, texts, "--to", "q8_0").refuses("quantize.exists")
    assert here("quantize", tmp_path / "none", out, "--to", "q8_0").code == 1
    assert not out.exists()
    for inside in (texts / "q.gguf", texts / ".." / texts.name / "q"):
        assert here("quantize", texts, inside, "--to", "int4").refuses("quantize.inside")
    assert not (texts / "q.gguf").exists()


def test_quantize_refuses_a_tokenizer_by_name(here: Here, tiny: Path, tmp_path: Path) -> None:
    ended = here("quantize", tiny, tmp_path / "q.gguf", "--to", "q8_0")
    assert ended.refuses("quantize.tokenizer", model="model")
    assert ended.code == 1
    assert list(tmp_path.iterdir()) == []
