"""The fixtures themselves: a guard that cannot bark protects nothing."""

import pytest

from red_zones import RedZones


@pytest.mark.parametrize("element", [-1, 12], ids=["one element before", "one element after"])
@pytest.mark.parametrize("dtype_name", ["float32", "bfloat16", "uint8"])
def test_a_write_beside_a_guarded_tensor_is_found(element: int, dtype_name: str) -> None:
    import torch

    zones = RedZones(torch.device("cpu"))
    tensor = zones.allocate(3, 4, dtype=getattr(torch, dtype_name))
    tensor.fill_(7)
    zones.check()
    tensor.as_strided((1,), (1,), tensor.storage_offset() + element).fill_(1)
    with pytest.raises(AssertionError, match=r"bytes were written (before|after) a tensor of \(3, 4\)"):
        zones.check()


def test_guarded_memory_is_aligned_for_kernels(guarded) -> None:
    tensor = guarded(5, 3)
    assert tensor.shape == (5, 3)
    assert tensor.data_ptr() % 16 == 0
    assert tensor.is_contiguous()


def test_poisoned_memory_reads_as_nan(poison) -> None:
    import torch

    assert torch.empty(64).isnan().all()


def test_poison_ends_with_its_test() -> None:
    import torch

    assert not torch.are_deterministic_algorithms_enabled()
