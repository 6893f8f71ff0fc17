"""Sinks, soft caps and pages that windows give back, through every backend: whole texts in steps against float64."""

from dataclasses import replace

import pytest
import torch

from attention.steps import (
    QUIET,
    STEP_BOUNDS,
    TOLERANCE,
    Geometry,
    build,
    make_batch,
    on_triton,
    run_layer,
    run_steps,
    steps_of,
    texts,
)
from holdfast.cache.groups import HOLE
from holdfast.families.backends import BackendInputs, build_backend
from holdfast.families.grouped.declarations import (
    DECLARATIONS,
    NativePagedDeclaration,
    TorchPagedDeclaration,
    TritonPagedDeclaration,
    sink_terms,
)
from holdfast.families.grouped.native_backend import NativePagedAttention
from holdfast.families.grouped.torch_backend import TorchPagedAttention
from holdfast.families.grouped.triton_backend import TritonPagedAttention
from kernels.exactness import require_native, same_bits

pytestmark = QUIET

LENGTHS = [1, 7, 65, 130]
NAN = float("nan")
BACKENDS = {"C": NativePagedAttention, "torch": TorchPagedAttention, "triton": TritonPagedAttention}
EVERY_BACKEND = pytest.mark.parametrize("backend_type", BACKENDS.values(), ids=BACKENDS)
FORMATS = ("float32", "float16", "fp8", "turboquant_4bit_nc", "turboquant_3bit_nc")


def placed(geometry: Geometry, backend_type, device) -> Geometry:
    """Where the backend runs."""
    if backend_type is NativePagedAttention:
        require_native()
    return on_triton(geometry, device) if backend_type is TritonPagedAttention else geometry


def check(geometry: Geometry, backend_type, chunk: int, lengths=LENGTHS) -> None:
    made, num_pages = texts(geometry, lengths, consecutive=False)
    backend = build(backend_type, geometry, geometry.storage(num_pages))
    for layer, window in enumerate(geometry.windows):
        outputs = run_steps(backend, geometry, made, steps_of(made, chunk), layer=layer)
        for text, out in zip(made, outputs, strict=True):
            tolerance = TOLERANCE[geometry.dtype]
            torch.testing.assert_close(out.double(), text.exact(window, layer=layer), rtol=tolerance, atol=tolerance)


@pytest.mark.each_pair
@EVERY_BACKEND
@pytest.mark.parametrize("softcap", [None, 2.0], ids=["no cap", "capped"])
@pytest.mark.parametrize("has_sinks", [True, False], ids=["sinks", "none"])
def test_whole_texts_in_steps(device, backend_type, softcap, has_sinks):
    geometry = Geometry(windows=(None, 5, 1, 1000), softcap=softcap, has_sinks=has_sinks)
    check(placed(geometry, backend_type, device), backend_type, chunk=40, lengths=[1, 7, 70])


@pytest.mark.each_value
@pytest.mark.parametrize("kv_dtype", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_torch_paged_sinks_match_float64_in_every_format(kv_dtype, dtype):
    """What a CPU computes without C, and a GPU in float32."""
    geometry = Geometry(windows=(None, 37), kv_dtype=kv_dtype, dtype=dtype, softcap=4.0, has_sinks=True)
    check(geometry, TorchPagedAttention, chunk=40)


@EVERY_BACKEND
def test_rows_whose_logits_are_wanted(device, backend_type):
    geometry = placed(Geometry(windows=(5,), has_sinks=True, softcap=3.0), backend_type, device)
    (text, other), num_pages = texts(geometry, [20, 9], consecutive=False)
    backend = build(backend_type, geometry, geometry.storage(num_pages))
    batch, qkv = make_batch(geometry, [(text, 0, 20), (other, 0, 9)], wanted=[19, 28])
    out = run_layer(geometry, backend, qkv, batch, wanted_only=True).cpu().double()
    exact = torch.stack((text.exact(5)[-1], other.exact(5)[-1]))
    torch.testing.assert_close(out, exact, rtol=TOLERANCE[geometry.dtype], atol=TOLERANCE[geometry.dtype])


def test_captured_steps_have_padding_that_stays_zero(device):
    geometry = placed(Geometry(has_sinks=True), TritonPagedAttention, device)
    (text,), num_pages = texts(geometry, [20], consecutive=False)
    backend = build(TritonPagedAttention, geometry, geometry.storage(num_pages))
    batch, qkv = make_batch(geometry, [(text, 0, 20)], num_rows=24)
    out = run_layer(geometry, backend, qkv, batch, plan=backend.plan(batch, captured=True)).cpu()
    torch.testing.assert_close(
        out[:20].double(), text.exact(None), rtol=TOLERANCE[geometry.dtype], atol=TOLERANCE[geometry.dtype]
    )
    assert not out[20:].any()


def give_back(geometry: Geometry, storage, step, page_tokens: int) -> None:
    """What a scheduler does before a step: pages behind the window of its first position go, and others write them."""
    window = geometry.windows[0]
    assert window is not None
    for text, start, _ in step:
        for place in range(max(0, start - window + 1) // page_tokens):
            page, text.pages[place] = text.pages[place], HOLE
            if page == HOLE:
                continue
            for plane in geometry.cache.layers[0].planes:
                stored = storage.plane(0, plane.name)[page * page_tokens : (page + 1) * page_tokens]
                stored.fill_(255 if plane.dtype == "uint8" else NAN)


@pytest.mark.each_value
@EVERY_BACKEND
@pytest.mark.parametrize(("window", "page_tokens"), [(1, 4), (20, 16)])
@pytest.mark.parametrize("kv_dtype", ["float32", "fp8", "turboquant_3bit_nc"])
def test_pages_that_were_given_back_change_no_bit(device, backend_type, window, page_tokens, kv_dtype):
    if backend_type is NativePagedAttention and kv_dtype != "float32":
        pytest.skip("C reads plain pages")
    geometry = Geometry(windows=(window,), page_tokens=page_tokens, kv_dtype=kv_dtype, has_sinks=True)
    geometry = placed(geometry, backend_type, device)
    lengths = [70, 131]
    kept, num_pages = texts(geometry, lengths, consecutive=False)
    steps = steps_of(kept, 45)
    expected = run_steps(build(backend_type, geometry, geometry.storage(num_pages)), geometry, kept, steps)
    made, _ = texts(geometry, lengths, consecutive=False)
    storage = geometry.storage(num_pages)
    backend = build(backend_type, geometry, storage)
    for step in steps:
        own = [(made[kept.index(text)], start, end) for text, start, end in step]
        give_back(geometry, storage, own, page_tokens)
        batch, qkv = make_batch(geometry, own)
        out, row = run_layer(geometry, backend, qkv, batch).cpu(), 0
        for text, start, end in own:
            rows = out[row : row + end - start]
            assert same_bits(rows.float(), expected[made.index(text)][start:end].float()), f"{start=} {end=}"
            row += end - start
    assert any(text.pages[0] == HOLE for text in made), "nothing was given back"


@pytest.mark.parametrize("declaration", DECLARATIONS, ids=lambda one: one.name)
def test_backend_holds_planned_bytes_of_sinks(device, declaration):
    backend_type = {one.name: one for one in BACKENDS.values()}[declaration.name]
    for has_sinks in (True, False):
        geometry = placed(Geometry(windows=(None, 5), has_sinks=has_sinks), backend_type, device)
        backend = build_backend(
            declaration, geometry.specs, geometry.storage(2), BackendInputs(STEP_BOUNDS, sinks=geometry.sinks)
        )
        planned = {term.owner: term.num_bytes for term in sink_terms(geometry.specs)}
        assert planned == ({"attention/sinks": 2 * 6 * 4} if has_sinks else {})
        held = {owner: count for owner, count in backend.held_bytes().items() if owner == "attention/sinks"}
        assert held == planned


@pytest.mark.parametrize("backend_type", [NativePagedAttention, TorchPagedAttention], ids=["C", "torch"])
def test_sinks_must_be_those_of_the_layers(backend_type):
    geometry = placed(Geometry(has_sinks=True), backend_type, torch.device("cpu"))
    storage = geometry.storage(1)
    for wrong in (None, [None], [torch.zeros(5)], [torch.zeros(6, 1)]):
        with pytest.raises(AssertionError, match="sinks of"):
            backend_type(geometry.specs, storage, sinks=wrong)
    with pytest.raises(AssertionError, match="sinks of"):
        backend_type(replace(geometry, has_sinks=False).specs, storage, sinks=[torch.zeros(6)])


def test_declarations_accept_sinks_and_softcaps():
    plain = Geometry(kv_dtype="float32")
    half = replace(plain, dtype=torch.bfloat16, kv_dtype="bfloat16")
    for declaration, geometry, device_kind in (
        (NativePagedDeclaration(), plain, "cpu"),
        (TorchPagedDeclaration(), plain, "cpu"),
        (TritonPagedDeclaration(), half, "cuda"),
    ):
        (spec,) = geometry.specs
        own = replace(spec, device_kind=device_kind, softcap=50.0, has_sinks=True)
        assert declaration.unsupported(own) == declaration.unsupported(replace(own, softcap=None, has_sinks=False))
