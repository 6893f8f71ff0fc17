import pytest
import torch

from holdfast.memory.arena import MirroredTensor

CPU = torch.device("cpu")


def test_only_what_is_sent_arrives():
    mirrored = MirroredTensor((3, 4), torch.int32, CPU, is_shared=False)
    mirrored.host[:] = 7
    assert mirrored.tensor.tolist() == [[0] * 4] * 3
    mirrored.send([(1, 3), (6, 9)])
    assert mirrored.tensor.view(-1).tolist() == [0, 7, 7, 0, 0, 0, 7, 7, 7, 0, 0, 0]
    mirrored.wait()
    mirrored.host[:] = 8
    assert mirrored.tensor.view(-1).tolist() == [0, 7, 7, 0, 0, 0, 7, 7, 7, 0, 0, 0]


@pytest.mark.parametrize("ranges", [[], [(0, 0)], [(12, 12)]])
def test_nothing_to_send(ranges):
    mirrored = MirroredTensor((3, 4), torch.int64, CPU, is_shared=False)
    mirrored.host[:] = 7
    mirrored.send(ranges)
    assert not mirrored.tensor.any()


def test_shared_memory_needs_no_sending():
    mirrored = MirroredTensor((2, 2), torch.int64, CPU, is_shared=True)
    mirrored.host[1] = 5
    assert mirrored.tensor.tolist() == [[0, 0], [5, 5]]
    mirrored.send([(0, 4)])
    mirrored.wait()
    assert mirrored.tensor.tolist() == [[0, 0], [5, 5]]


@pytest.mark.gpu
def test_what_is_in_flight_is_not_overwritten(device):
    mirrored = MirroredTensor((1024,), torch.int64, device, is_shared=False)
    seen = [torch.zeros(1024, dtype=torch.int64, device=device) for _ in range(5)]
    for value, copy in enumerate(seen):
        torch.cuda._sleep(20_000_000)  # the copy below starts some 10 ms after it was asked for
        mirrored.wait()
        mirrored.host[:] = value + 1
        mirrored.send([(0, 1024)])
        copy.copy_(mirrored.tensor)
    assert [copy.unique().tolist() for copy in seen] == [[1], [2], [3], [4], [5]]


@pytest.mark.gpu
def test_the_host_is_pinned_and_does_not_wait_for_a_copy(device):
    mirrored = MirroredTensor((1024,), torch.int64, device, is_shared=False)
    assert torch.from_numpy(mirrored.host).is_pinned()
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    mirrored.send([(0, 1024)])
    assert not torch.cuda.current_stream().query()
    mirrored.wait()
    assert torch.cuda.current_stream().query()
