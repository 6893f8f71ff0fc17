"""Operations: one callable over a torch reference, a Triton launch and a C function, chosen by device; and launch flags."""

import inspect
from collections.abc import Callable
from functools import update_wrapper
from typing import Any, Generic, ParamSpec, TypeVar

import torch

from holdfast.kernels.triton_compat import can_run, pdl_launch, supports_pdl

P = ParamSpec("P")
R = TypeVar("R")
DECLINED: Any = NotImplemented
"""Return value of `native` for arguments that it does not support."""


class Operation(Generic[P, R]):
    """Call `triton` if the first tensor is on CUDA, else `native` if it takes the arguments, else `reference`.

    The three are plain attributes, so a test can replace one, or call two of them and compare.
    """

    def __init__(
        self,
        reference: Callable[P, R],
        triton: Callable[P, R],
        native: Callable[P, R] | None,
        place: Callable[P, torch.Tensor] | None,
    ) -> None:
        update_wrapper(self, reference)
        self.__name__ = reference.__name__.removesuffix("_reference")
        self.__qualname__ = reference.__qualname__.removesuffix("_reference")
        self.reference, self.triton, self.native, self.place = reference, triton, native, place
        parameters = inspect.signature(reference).parameters.values()
        tensors = [(i, one.name) for i, one in enumerate(parameters) if one.annotation is torch.Tensor]
        assert tensors or place is not None, f"{self.__name__} has no tensor parameter: pass place="
        self._index, self._name = tensors[0] if tensors else (0, "")

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if self.place is not None:
            tensor = self.place(*args, **kwargs)
        else:
            tensor = args[self._index] if len(args) > self._index else kwargs[self._name]
        if can_run(tensor):  # type: ignore[arg-type]
            return self.triton(*args, **kwargs)
        if self.native is not None:
            result = self.native(*args, **kwargs)
            if result is not DECLINED:
                return result
        return self.reference(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<operation {self.__module__}.{self.__qualname__}>"


def operation(
    *,
    reference: Callable[P, R],
    triton: Callable[P, R],
    native: Callable[P, R] | None = None,
    place: Callable[P, torch.Tensor] | None = None,
) -> Operation[P, R]:
    """Join implementations with one signature; name and docstring come from `reference`, without its `_reference`.

    `native` returns DECLINED for arguments that it does not take. `place` returns the tensor whose device decides; the
    default is the first parameter annotated as a tensor.
    """
    return Operation(reference, triton, native, place)


def pdl_flags(tensor: torch.Tensor) -> dict[str, bool]:
    """Return the constant PDL of a kernel, with the launch option that it must match."""
    pdl = supports_pdl(tensor)
    return {"PDL": pdl, **pdl_launch(pdl)}
