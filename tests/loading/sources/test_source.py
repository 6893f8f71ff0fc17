"""Sources: what each kind implements, and that opening one reads no weights and imports no torch."""

import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.loading.sources.safetensors import SafetensorsSource
from holdfast.loading.sources.source import RowRead, TogetherSource, WeightSource
from loading.safetensors_bytes import write
from loading.tensor_source import TensorSource

PROGRAM = """
import sys
from pathlib import Path
from holdfast.loading.model_files import open_model
from holdfast.loading.planning.plan import plan_load

class Bar:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers", "safetensors", "numpy"):
            raise ImportError(f"{name} is barred")

sys.meta_path.insert(0, Bar())
for load_format in ("auto", "dummy"):
    opened = open_model(sys.argv[1], load_format)
    plan = plan_load(opened.parameters, opened.source, "bfloat16")
    print(opened.kind, opened.spec.num_layers, plan.final_bytes)
"""
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 10,
    "hidden_size": 4,
    "intermediate_size": 6,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "tie_word_embeddings": True,
}
SHAPES = {
    "model.embed_tokens.weight": [10, 4],
    "model.norm.weight": [4],
    "model.layers.0.input_layernorm.weight": [4],
    "model.layers.0.post_attention_layernorm.weight": [4],
    "model.layers.0.self_attn.q_proj.weight": [4, 4],
    "model.layers.0.self_attn.k_proj.weight": [4, 4],
    "model.layers.0.self_attn.v_proj.weight": [4, 4],
    "model.layers.0.self_attn.o_proj.weight": [4, 4],
    "model.layers.0.mlp.gate_proj.weight": [6, 4],
    "model.layers.0.mlp.up_proj.weight": [6, 4],
    "model.layers.0.mlp.down_proj.weight": [4, 6],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    write(tmp_path / "model.safetensors", {name: ("BF16", shape) for name, shape in SHAPES.items()})
    return tmp_path


def test_open_and_plan_import_no_torch(folder):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stderr == ""
    num_bytes = 8 * 256  # embed, three norms, qkv, o, gate_up, down: each at an aligned place
    assert done.stdout.splitlines() == [f"directory 1 {num_bytes}"] * 2


def test_row_read_fields_match_read_into_parameters():
    """In the same order: sources are called with `read_into(*read)`."""
    assert ("self", *RowRead._fields) == tuple(inspect.signature(WeightSource.read_into).parameters)


def test_safetensors_source_is_a_together_source():
    assert isinstance(SafetensorsSource([]), TogetherSource)
    assert not isinstance(TensorSource(), TogetherSource)
