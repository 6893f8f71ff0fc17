import dataclasses
import json
from pathlib import Path

import pytest

from holdfast.loading.model_files import open_model
from holdfast.loading.planning.open_model import GenerationDefaults, OpenModel
from loading.safetensors_bytes import write
from loading.sources.test_source import CONFIG, SHAPES


@pytest.fixture
def opened(tmp_path: Path) -> OpenModel:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    write(tmp_path / "model.safetensors", {name: ("BF16", shape) for name, shape in SHAPES.items()})
    return open_model(str(tmp_path), "auto")


def test_a_folder_is_known_from_its_headers(opened):
    assert opened.kind == "directory"
    assert opened.gguf is None
    assert opened.stored is None, "nothing in it is quantized"
    wanted = {part.tensor for parameter in opened.parameters for part in parameter.parts}
    assert wanted == set(opened.source.entries) == set(SHAPES)


def test_nothing_about_an_open_model_changes(opened):
    with pytest.raises(dataclasses.FrozenInstanceError):
        opened.kind = "gguf"  # type: ignore[misc]


def test_makers_who_say_nothing_advise_nothing():
    advice = GenerationDefaults()
    assert advice.eos_token_ids == ()
    assert all(getattr(advice, field.name) is None for field in dataclasses.fields(advice)[1:])
