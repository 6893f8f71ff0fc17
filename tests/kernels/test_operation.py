"""Operations: which implementation runs, with which arguments, and what a caller sees of the three."""

import inspect
import timeit

import pytest
import torch

from holdfast.kernels import operation as module
from holdfast.kernels.operation import DECLINED, operation


def scale_reference(factor: float, x: torch.Tensor, bias: float = 0.0) -> tuple[str, float, float]:
    """Multiply x."""
    return "reference", factor, bias


def scale_triton(factor: float, x: torch.Tensor, bias: float = 0.0) -> tuple[str, float, float]:
    return "triton", factor, bias


def scale_native(factor: float, x: torch.Tensor, bias: float = 0.0) -> tuple[str, float, float]:
    return ("native", factor, bias) if factor > 0 else DECLINED


X = torch.zeros(1)
scale = operation(reference=scale_reference, triton=scale_triton)
with_native = operation(reference=scale_reference, triton=scale_triton, native=scale_native)


def test_operation_passes_positional_and_named_arguments():
    for call in (
        lambda op: op(2.0, X, 3.0),
        lambda op: op(2.0, bias=3.0, x=X),
        lambda op: op(factor=2.0, x=X, bias=3.0),
    ):
        assert call(scale) == ("reference", 2.0, 3.0)
        assert call(with_native) == ("native", 2.0, 3.0)


def test_operation_native_decline_falls_back_to_reference():
    assert with_native(-2.0, X) == ("reference", -2.0, 0.0)


def test_operation_prefers_triton_over_native_and_reference(monkeypatch):
    given = []
    monkeypatch.setattr(module, "can_run", lambda tensor: given.append(tensor) or True)
    assert with_native(2.0, X) == scale(factor=2.0, x=X) == ("triton", 2.0, 0.0)
    assert all(tensor is X for tensor in given)


def test_operation_place_names_the_deciding_tensor(monkeypatch):
    def first_reference(parts: list[torch.Tensor]) -> str:
        return "reference"

    def first_triton(parts: list[torch.Tensor]) -> str:
        return "triton"

    with pytest.raises(AssertionError, match="first has no tensor parameter"):
        operation(reference=first_reference, triton=first_triton)
    first = operation(reference=first_reference, triton=first_triton, place=lambda parts: parts[1])
    monkeypatch.setattr(module, "can_run", lambda tensor: tensor is X)
    assert first([torch.ones(1), X]) == "triton"
    assert first(parts=[X, torch.ones(1)]) == "reference"


def test_operation_calls_a_replaced_implementation(monkeypatch):
    monkeypatch.setattr(scale, "reference", lambda *args, **named: "mine")
    assert scale(2.0, X) == "mine"


def test_operation_has_name_docstring_and_signature_of_reference():
    assert (scale.__name__, scale.__doc__, scale.__module__) == ("scale", "Multiply x.", __name__)
    assert inspect.signature(scale) == inspect.signature(scale_reference)
    assert repr(scale) == f"<operation {__name__}.scale>"


def test_operation_call_costs_at_most_two_microseconds():
    seconds = min(timeit.repeat(lambda: with_native(2.0, X), number=1000, repeat=5))
    assert seconds / 1000 < 2e-6
