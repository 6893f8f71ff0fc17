import pytest
import torch

from holdfast.loading.execution.ring import PinnedMemory

NUM_BYTES = 3 * 2**20 + 4096


class FakeRuntime:
    def __init__(self, code):
        self.code, self.pinned = code, {}

    def cudaHostRegister(self, address, num_bytes, flags):
        if self.code == 0:
            self.pinned[address] = num_bytes
        return self.code

    def cudaHostUnregister(self, address):
        del self.pinned[address]


def test_exactly_what_was_asked_is_pinned_and_given_back(monkeypatch):
    runtime = FakeRuntime(0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    memory = PinnedMemory(NUM_BYTES)
    assert runtime.pinned == {memory.tensor.data_ptr(): NUM_BYTES}
    memory.view[5:8] = b"abc"
    assert bytes(memory.tensor[4:9].tolist()) == b"\0abc\0"
    assert memory.tensor.numel() == len(memory.view) == NUM_BYTES
    memory.release()
    memory.release()
    assert runtime.pinned == {}


def test_memory_that_cannot_be_pinned_is_told(monkeypatch):
    monkeypatch.setattr(torch.cuda, "cudart", lambda: FakeRuntime(2))
    with pytest.raises(RuntimeError, match="could not be allocated as pinned: CUDA error 2"):
        PinnedMemory(NUM_BYTES)


@pytest.mark.gpu
def test_a_gpu_copies_from_it_by_itself():
    memory = PinnedMemory(NUM_BYTES)
    memory.tensor.copy_(torch.arange(NUM_BYTES) % 251)
    there = torch.empty(NUM_BYTES, dtype=torch.uint8, device="cuda")
    there.copy_(memory.tensor, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(there.cpu(), memory.tensor)
    memory.release()
