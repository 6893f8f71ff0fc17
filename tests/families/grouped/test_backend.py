"""What every attention backend keeps to, whichever it is: its contract, run over random steps."""

import inspect
from dataclasses import FrozenInstanceError

import pytest
import torch

from attention.steps import (
    QUIET,
    Geometry,
    build,
    make_batch,
    on_triton,
    run_layer,
    run_steps,
    scratch_for,
    steps_of,
    texts,
)
from holdfast.attention.backend import Batch, LayerStep, LogitRows, SequenceRows
from holdfast.cache.storage import PageStorage
from holdfast.families.grouped.declarations import DECLARATIONS
from holdfast.families.grouped.native_backend import NativePagedAttention
from holdfast.families.grouped.pages import GroupedBackend
from holdfast.families.grouped.torch_backend import TorchPagedAttention
from holdfast.families.grouped.triton_backend import TritonPagedAttention
from kernels.exactness import require_native, same_bits

BACKENDS = (NativePagedAttention, TritonPagedAttention, TorchPagedAttention)
QUANTIZED = "turboquant_k8v4 turboquant_3bit_nc"
CASES = [
    *((backend, "float32") for backend in BACKENDS),
    (TorchPagedAttention, QUANTIZED),
    (TorchPagedAttention, "turboquant_4bit_nc float32"),
]
MORE_CASES = [*CASES, (TritonPagedAttention, "turboquant_k8v4 turboquant_4bit_nc")]


def cases(listed: list) -> pytest.MarkDecorator:
    ids = [f"{backend.name}-{kv_dtype}" for backend, kv_dtype in listed]
    return pytest.mark.parametrize(("backend_type", "kv_dtype"), listed, ids=ids)


EVERY_BACKEND = cases(CASES)
EVERY_KERNEL = cases(MORE_CASES)
"""The interpreter takes its time over codes."""
pytestmark = QUIET
WINDOWS = (None, 5)
TOLERANCE = {torch.float32: 2e-5, torch.float16: 6e-3}


@pytest.fixture
def geometry(backend_type, kv_dtype, device) -> Geometry:
    if backend_type is NativePagedAttention:
        require_native()
    plain = Geometry(windows=WINDOWS, kv_dtype=kv_dtype)
    return on_triton(plain, device) if backend_type is TritonPagedAttention else plain


def planes_of(geometry: Geometry, storage: PageStorage, layer: int) -> list[torch.Tensor]:
    return [storage.plane(layer, plane.name) for plane in geometry.cache.layers[layer].planes]


def page_bytes(geometry: Geometry, storage: PageStorage, layer: int) -> list[torch.Tensor]:
    """Every plane of a layer as [pages, bytes of a page], on the host."""
    planes = planes_of(geometry, storage, layer)
    return [plane.contiguous().view(storage.num_pages, -1).view(torch.uint8).cpu() for plane in planes]


def close(geometry: Geometry, out: torch.Tensor, exact: torch.Tensor) -> None:
    tolerance = TOLERANCE[geometry.dtype]
    torch.testing.assert_close(out.cpu().double(), exact.double(), rtol=tolerance, atol=tolerance)


def test_declarations_and_backends_have_same_names():
    assert [backend.name for backend in BACKENDS] == [declaration.name for declaration in DECLARATIONS]


@pytest.mark.parametrize("backend_type", BACKENDS, ids=lambda backend: backend.name)
def test_backend_methods_have_signatures_of_contract(backend_type):
    for verb in ("plan", "write", "attend"):
        wanted = list(inspect.signature(getattr(GroupedBackend, verb)).parameters)
        assert list(inspect.signature(getattr(backend_type, verb)).parameters) == wanted


@EVERY_KERNEL
def test_keys_and_values_are_written_before_they_are_attended_to(backend_type, geometry):
    """A lone token sees itself, so what comes out is its own value."""
    made, num_pages = texts(geometry, [1], consecutive=True)
    backend = build(backend_type, geometry, geometry.storage(num_pages))
    (out,) = run_steps(backend, geometry, made, [[(made[0], 0, 1)]])
    close(geometry, out, made[0].exact(None))
    if not geometry.formats[0].is_quantized:
        value = made[0].qkv[:, -32:].view(1, 2, 1, 16).expand(1, 2, 3, 16).reshape(1, -1)
        close(geometry, out, value)


@pytest.mark.each_value
@EVERY_KERNEL
@pytest.mark.parametrize("layer", [0, 1])
def test_mixed_steps_are_exact(backend_type, geometry, layer):
    made, num_pages = texts(geometry, [1, 30, 70], consecutive=False)
    head_norm, rotary = geometry.head_norm(), geometry.rotary()
    backend = build(backend_type, geometry, geometry.storage(num_pages))
    for text, out in zip(
        made, run_steps(backend, geometry, made, steps_of(made, 24), head_norm, rotary, layer), strict=True
    ):
        close(geometry, out, text.exact(WINDOWS[layer], head_norm, rotary, layer))


@EVERY_BACKEND
def test_layers_keep_to_their_own_planes(backend_type, geometry):
    made, num_pages = texts(geometry, [9], consecutive=False)
    storage = geometry.storage(num_pages)
    backend = build(backend_type, geometry, storage)
    batch, qkv = make_batch(geometry, [(made[0], 0, 9)])
    run_layer(geometry, backend, qkv, batch, layer=1)
    untouched = geometry.storage(num_pages)
    for layer, expected in ((0, True), (1, False)):
        pairs = zip(page_bytes(geometry, storage, layer), page_bytes(geometry, untouched, layer), strict=True)
        assert all(torch.equal(plane, before) == expected for plane, before in pairs)


@EVERY_BACKEND
def test_backend_leaves_projection_unchanged(backend_type, geometry):
    made, num_pages = texts(geometry, [9, 1], consecutive=False)
    backend = build(backend_type, geometry, geometry.storage(num_pages))
    batch, qkv = make_batch(geometry, [(made[0], 0, 9), (made[1], 0, 1)])
    before = qkv.clone()
    run_layer(geometry, backend, qkv, batch, geometry.head_norm(), geometry.rotary())
    assert torch.equal(qkv, before)


@EVERY_BACKEND
def test_backend_window_counts_current_token(backend_type, geometry):
    made, num_pages = texts(geometry, [40], consecutive=False)
    backend = build(backend_type, geometry, geometry.storage(num_pages))
    (out,) = run_steps(backend, geometry, made, steps_of(made, 7), layer=1)
    close(geometry, out, made[0].exact(5, layer=1))
    assert (out.double() - made[0].exact(4, layer=1)).abs().max() > 0.01
    assert (out.double() - made[0].exact(6, layer=1)).abs().max() > 0.01


@pytest.mark.each_pair
@EVERY_BACKEND
@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("wanted", [[11], [3, 11, 12], []], ids=str)
def test_backend_wanted_only_returns_wanted_rows(backend_type, geometry, layer, wanted):
    """All rows leave their keys and values; the wanted ones come out as they would among all, side by side."""
    made, num_pages = texts(geometry, [12, 20], consecutive=False)
    parts = [(made[0], 0, 12), (made[1], 19, 20)]
    backend = build(backend_type, geometry, geometry.storage(num_pages))
    run_steps(backend, geometry, made, [[(made[1], 0, 19)]], layer=layer)
    batch, qkv = make_batch(geometry, parts)
    every = run_layer(geometry, backend, qkv, batch, layer=layer).clone()
    chosen, qkv = make_batch(geometry, parts, wanted=wanted)
    assert same_bits(run_layer(geometry, backend, qkv, chosen, layer=layer), every), "who does not ask gets all"
    some = run_layer(geometry, backend, qkv, chosen, layer=layer, wanted_only=True)
    assert some.shape == (len(wanted), every.shape[1])
    torch.testing.assert_close(some, every[wanted], rtol=2e-5, atol=2e-5)
    unnamed = run_layer(geometry, backend, qkv, batch, layer=layer, wanted_only=True)
    assert same_bits(unnamed, every), "no rows are named, so all are wanted"


@EVERY_KERNEL
def test_padding_leaves_nothing_and_changes_nothing(backend_type, geometry):
    made, num_pages = texts(geometry, [9, 30], consecutive=False)
    parts = [(made[0], 0, 9), (made[1], 0, 30)]
    storage = geometry.storage(num_pages)
    backend = build(backend_type, geometry, storage)
    batch, qkv = make_batch(geometry, parts)
    expected = run_layer(geometry, backend, qkv, batch).clone()
    planes = [plane.clone() for plane in page_bytes(geometry, storage, 0)]
    padded, qkv = make_batch(geometry, parts, num_rows=48)
    out = run_layer(geometry, backend, qkv, padded)
    assert same_bits(out[:39], expected)
    for plane, before in zip(page_bytes(geometry, storage, 0), planes, strict=True):
        assert torch.equal(plane, before)


@EVERY_BACKEND
def test_backend_attend_writes_given_output(backend_type, geometry):
    made, num_pages = texts(geometry, [5], consecutive=False)
    backend = build(backend_type, geometry, geometry.storage(num_pages))
    batch, qkv = make_batch(geometry, [(made[0], 0, 5)])
    q, out = qkv.new_zeros(5, 6, 16), qkv.new_zeros(5, 96)
    plan = backend.plan(batch)
    assert backend.write(qkv, batch, None, None, 0, q) is None
    assert backend.attend(q, LayerStep(0, plan, scratch_for(geometry)), out, False).data_ptr() == out.data_ptr()
    close(geometry, out, made[0].exact(None))


@EVERY_KERNEL
def test_attention_plan_is_reusable_across_layers_and_steps(backend_type, geometry):
    """Planned once, attended to twice."""
    made, num_pages = texts(geometry, [12], consecutive=False)
    backend = build(backend_type, geometry, geometry.storage(num_pages))
    batch, qkv = make_batch(geometry, [(made[0], 0, 12)])
    plan = backend.plan(batch)
    for layer, window in enumerate(WINDOWS):
        first = run_layer(geometry, backend, qkv, batch, layer=layer, plan=plan)
        close(geometry, first, made[0].exact(window, layer=layer))
        assert same_bits(run_layer(geometry, backend, qkv, batch, layer=layer, plan=plan), first)


@EVERY_KERNEL
def test_backend_nan_in_one_sequence_stays_there(backend_type, geometry):
    made, num_pages = texts(geometry, [20, 20], consecutive=False)
    made[1].qkv[3] = float("nan")
    backend = build(backend_type, geometry, geometry.storage(num_pages))
    healthy, hurt = run_steps(backend, geometry, made, [[(made[0], 0, 20), (made[1], 0, 20)]])
    close(geometry, healthy, made[0].exact(None))
    assert hurt[3:].isnan().any()


@EVERY_BACKEND
def test_pages_that_are_not_needed_yet_may_be_listed(backend_type, geometry):
    """A sequence holds pages for its next tokens before it writes them."""
    made, num_pages = texts(geometry, [30], consecutive=False)
    backend = build(backend_type, geometry, geometry.storage(num_pages))
    batch, qkv = make_batch(geometry, [(made[0], 0, 9)])
    close(geometry, run_layer(geometry, backend, qkv, batch), made[0].exact(None)[:9])


@EVERY_BACKEND
def test_unused_pages_are_neither_read_nor_written(backend_type, geometry):
    made, num_pages = texts(geometry, [30, 9], consecutive=False)
    storage = geometry.storage(num_pages)
    run_steps(build(backend_type, geometry, storage), geometry, made, steps_of(made, 8))
    used = {text.pages[i // 4] for text in made for i in range(len(text.qkv))}
    unused = [page for page in range(num_pages) if page not in used]
    pairs = zip(page_bytes(geometry, storage, 0), page_bytes(geometry, geometry.storage(num_pages), 0), strict=True)
    for plane, before in pairs:
        assert torch.equal(plane[unused], before[unused])
        assert (plane[sorted(used)] != before[sorted(used)]).any(dim=1).all()
    # The last page of a text is not full: what is behind its end stays as it was.
    for plane in planes_of(geometry, storage, 0):
        if plane.is_floating_point():
            num_tokens = sum(len(text.qkv) for text in made)
            assert plane.isfinite().sum() == num_tokens * plane[0].numel()


def test_sequence_rows_end_is_start_plus_num_rows():
    assert SequenceRows(row_start=5, num_rows=3, start=40, tables=([1],)).end == 43


def test_batch_num_rows_includes_padding():
    rows = torch.zeros(9, dtype=torch.int64)
    sequences = (SequenceRows(0, 4, 0, ([0],)), SequenceRows(4, 3, 9, ([1, 2],)))
    batch = Batch(rows, rows, rows, sequences, None)
    assert batch.num_rows == 9
    assert sum(sequence.num_rows for sequence in batch.sequences) == 7


def test_batch_without_device_has_no_page_tables():
    rows = torch.zeros(1, dtype=torch.int64)
    sequence = SequenceRows(0, 1, 0, ([0],))
    assert sequence.table_row == -1
    assert Batch(rows, rows, rows, (sequence,), None).page_tables is None


def test_batch_and_logit_rows_are_frozen():
    rows = torch.zeros(1, dtype=torch.int64)
    for value, field in ((Batch(rows, rows, rows, (), None), "logits"), (LogitRows(rows, ()), "sequences")):
        with pytest.raises(FrozenInstanceError):
            setattr(value, field, ())
