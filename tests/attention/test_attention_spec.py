import subprocess
import sys
from dataclasses import FrozenInstanceError, replace

import pytest

from holdfast.attention.declarations import DECLARATIONS, AttentionSpec, BackendDeclaration, StepBounds
from holdfast.cache.spec import LayerCache
from holdfast.quant.formats import KV_FORMATS

LAYER = LayerCache(0, "attention", KV_FORMATS["bfloat16"], 8, 128)
SPEC = AttentionSpec(LAYER, 64, 128**-0.5, None, 4096, "bfloat16", "cuda")


@pytest.mark.parametrize(
    ("value", "field"), [(SPEC, "window"), (StepBounds(8, 512, 16), "max_num_rows")], ids=["spec", "bounds"]
)
def test_values_stay_as_they_are(value, field):
    with pytest.raises(FrozenInstanceError):
        setattr(value, field, 1)


def test_layers_that_are_alike_are_equal():
    assert len({SPEC, replace(SPEC), replace(SPEC, window=5)}) == 2


@pytest.mark.parametrize("declaration", DECLARATIONS, ids=lambda declaration: declaration.name)
def test_every_declaration_answers_all_that_is_asked(declaration: BackendDeclaration):
    bounds = StepBounds(8, 512, 16)
    assert declaration.unsupported(SPEC) is None or isinstance(declaration.unsupported(SPEC), str)
    assert isinstance(declaration.scratch([SPEC], bounds), tuple)
    assert isinstance(declaration.terms([SPEC], bounds), tuple)


def test_planning_imports_no_torch():
    code = "import sys, holdfast.attention.declarations, holdfast.attention.declarations; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
