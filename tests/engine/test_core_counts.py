"""Counts of a core process: what its last message and its pulse say together of sequences that wait."""

from collections import deque
from types import SimpleNamespace

from for_each import for_each
from holdfast.engine.core_process import CoreProcess
from holdfast.engine.pulse import CoreCounts


@for_each(
    "num_sent, counts, num_unseen, expected",
    [
        (4, CoreCounts(4, 0, 4, 0.5), 0, 0),
        (0, CoreCounts(4, 0, 4, 0.5), 4, 0),
        (0, CoreCounts(3, 1, 4, 0.5), 6, 3),
        (4, CoreCounts(0, 0, 0, 0.0), 2, 9),
    ],
)
def test_num_queued_counts_each_sequence_once(
    num_sent: int, counts: CoreCounts, num_unseen: int, expected: int
) -> None:
    core = CoreProcess.__new__(CoreProcess)
    core.last_stats = SimpleNamespace(num_waiting=7, num_submitted=num_sent)  # type: ignore[assignment]
    core.unseen = deque(range(num_sent, num_sent + num_unseen))
    core.child = SimpleNamespace(pulse=SimpleNamespace(counts=lambda: counts))  # type: ignore[assignment]
    assert core.num_queued == expected
