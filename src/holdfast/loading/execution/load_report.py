"""LoadReport: what a load took, in seconds and bytes, as it was measured; no torch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Reading, copying and placing go on at the same time, so their seconds need not add up to those of the load."""

    seconds: float
    """From the first byte taken to the last weight in place."""
    read_bytes: int
    """Of the checkpoint, as the plan counts them."""
    read_seconds: float
    """Spent on reading, summed over the readers; 0 where the source made the rows up."""
    num_readers: int
    copy_seconds: float
    """Spent by the GPU on copies; told from a sample of the chunks."""
    place_seconds: float
    """Spent on converting and quantizing into place; on a GPU told from a sample of the chunks."""
    final_bytes: int
    staging_bytes: int
    pinned_bytes: int
    peak_allocated_bytes: int | None
    """The most in live tensors of the process on the device, as its allocator counts; None on a CPU."""
    peak_reserved_bytes: int | None
    """The most that the allocator had taken."""
    device_used_bytes: int | None
    """Of the whole device, by everybody, when all weights were in place and the staging was still there."""
    peak_anonymous_bytes: int | None
    """The most anonymous host memory of the process, looked at some times a second; None where it cannot be asked."""

    @property
    def bytes_per_second(self) -> float:
        return self.read_bytes / max(self.seconds, 1e-9)

    @property
    def words(self) -> str:
        """One line."""
        parts = [f"{self.read_bytes / 1e9:.2f} GB in {self.seconds:.2f} s, {self.bytes_per_second / 1e9:.1f} GB/s"]
        if self.num_readers:
            parts.append(f"reading {self.read_seconds:.2f} s in {self.num_readers} threads")
        if self.copy_seconds:
            parts.append(f"copying {self.copy_seconds:.2f} s")
        parts.append(f"placing {self.place_seconds:.2f} s")
        return "; ".join(parts)
