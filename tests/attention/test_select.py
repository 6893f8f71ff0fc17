import pytest

from attention.steps import Geometry
from holdfast.attention.declarations import DECLARATIONS, choose_declaration
from holdfast.attention.native_paged import NativePagedAttention
from holdfast.attention.select import build_backend
from holdfast.attention.spec import StepBounds
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
    geometry = Geometry()
    backend = build_backend(DECLARATIONS[1], geometry.specs, geometry.storage(4), BOUNDS, 77, batch_invariant)
    assert isinstance(backend, TritonPagedAttention)
    assert (backend._num_sms, backend._batch_invariant) == (77, batch_invariant)
