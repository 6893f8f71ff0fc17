import pytest
import torch

from attention.steps import Geometry
from attention.work_lists import made_up_batch
from holdfast.attention.declarations import DECLARATIONS, StepBounds, choose_declaration
from holdfast.attention.native_paged import NativePagedAttention
from holdfast.attention.select import build_backend
from holdfast.attention.torch_paged import TorchPagedAttention
from holdfast.attention.triton_paged import TritonPagedAttention
from kernels.exactness import require_native

BOUNDS = StepBounds(max_num_seqs=4, max_num_rows=64, page_tokens=4)
BACKENDS = {backend.name: backend for backend in (NativePagedAttention, TritonPagedAttention, TorchPagedAttention)}


@pytest.mark.parametrize("declaration", DECLARATIONS, ids=lambda declaration: declaration.name)
def test_every_declaration_becomes_the_backend_of_its_name(declaration):
    geometry = Geometry(windows=(None, 5))
    backend = build_backend(declaration, geometry.specs, geometry.storage(4), BOUNDS, 2, False)
    assert type(backend) is BACKENDS[declaration.name]
    assert backend.name == declaration.name


def test_what_was_chosen_is_what_is_built():
    require_native()
    geometry = Geometry()
    declaration = choose_declaration(geometry.specs)
    assert (
        type(build_backend(declaration, geometry.specs, geometry.storage(4), BOUNDS, 1, True)) is NativePagedAttention
    )


@pytest.mark.parametrize("batch_invariant", [True, False])
def test_the_machine_and_the_wish_reach_the_backend(batch_invariant):
    """A lone long row is split for the machine, or by its own length."""
    geometry = Geometry(max_model_len=40000, num_heads=1, num_kv_heads=1, page_tokens=4)
    bounds = StepBounds(max_num_seqs=1, max_num_rows=64, page_tokens=4)
    backend = build_backend(DECLARATIONS[1], geometry.specs, geometry.storage(4), bounds, 77, batch_invariant)
    (work,) = backend.plan(made_up_batch([(39999, 1)])).work.values()
    assert work.rows_T2[0, 1] == (63 if batch_invariant else 125), "of whole blocks"


@pytest.mark.parametrize("declaration", DECLARATIONS[1:], ids=lambda declaration: declaration.name)
def test_means_reach_the_pages_of_their_layer(declaration):
    geometry = Geometry(windows=(None, None), kv_dtype="float32 turboquant_4bit_nc", page_tokens=16)
    mean = torch.ones(2, 16)
    backend = build_backend(declaration, geometry.specs, geometry.storage(4), BOUNDS, 1, False, [None, mean])
    assert backend._pages[1].planes.k_mean_KD is mean
