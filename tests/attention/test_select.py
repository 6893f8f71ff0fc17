from dataclasses import replace
from typing import ClassVar

import pytest
import torch

from attention.steps import Geometry
from holdfast.attention.native_paged import NativePagedAttention
from holdfast.attention.select import CANDIDATES, select_backend
from holdfast.attention.torch_paged import TorchPagedAttention
from holdfast.errors import UnsupportedModelError
from kernels.exactness import require_native


class Picky(TorchPagedAttention):
    """Declines every layer, each window in its own words."""

    name: ClassVar[str] = "picky"

    @staticmethod
    def unsupported(spec):
        return f"window {spec.window} is not liked"


def test_the_first_that_takes_every_layer():
    require_native()
    specs = Geometry(windows=(None, 5)).specs
    assert select_backend(CANDIDATES, specs) is NativePagedAttention
    assert select_backend((Picky, *reversed(CANDIDATES)), specs) is TorchPagedAttention


def test_one_layer_is_enough_to_decline():
    first, second = Geometry(windows=(None, None)).specs
    half = replace(second, cache=Geometry(kv_dtype="float16").cache.layers[0])
    assert select_backend(CANDIDATES, (first, half)) is TorchPagedAttention


def test_every_reason_is_listed_once():
    specs = Geometry(num_heads=7, num_kv_heads=2, windows=(None, 5, None), dtype=torch.float16).specs
    with pytest.raises(UnsupportedModelError) as caught:
        select_backend((Picky, *CANDIDATES), specs)
    assert str(caught.value) == (
        "attention for this model was asked; no backend fits (picky: window None is not liked, window 5 is not liked; "
        "native_paged: it computes in float32 over float32 pages only; "
        "torch_paged: 7 query heads do not divide into 2 key heads); choose another kv_cache_dtype"
    )


def test_a_gpu_falls_to_a_backend_that_runs_there():
    spec = replace(Geometry().specs[0], device=torch.device("cuda", 0))
    assert select_backend(CANDIDATES, [spec]).unsupported(spec) is None
