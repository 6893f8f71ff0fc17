"""Dummy figures of formats, for tests of what is reported about them."""

from holdfast.cli.tables import EvalView
from holdfast.eval.quality import Quality

BASE = {
    "num_predictions": 2046,
    "perplexity": 12.5,
    "perplexity_error": 0.25,
    "change_error": 0.0,
    "mean_kl": 0.0,
    "kl_error": 0.0,
    "p99_kl": 0.0,
    "p999_kl": 0.0,
    "max_kl": 0.0,
    "agreement": 1.0,
    "kl_by_place": (0.0, 0.0),
    "num_broken": 0,
    "seconds": 4.0,
}


def quality(name: str, size_bytes: float, **figures) -> Quality:
    """One format."""
    return Quality(name=name, size_bytes=size_bytes, **(BASE | figures))


def view(*others: Quality) -> EvalView:
    """A run of two windows against float32."""
    reference = quality("float32", 4096.0)
    return EvalView("Tiny", "float32 on cpu", "book.txt", 1024, 2, 2048.0, [reference, *others])


FP8 = quality(
    "fp8",
    1040.0,
    perplexity=12.625,
    mean_kl=0.000512,
    p99_kl=0.0123,
    p999_kl=0.0234,
    max_kl=0.0345,
    change_error=0.0021,
    agreement=0.9912,
    kl_by_place=(0.0004, 0.0006),
    seconds=8.0,
)
FEW = quality(
    "turboquant_3bit_nc", 400.0, perplexity=14.0, mean_kl=0.08, p99_kl=0.9, agreement=0.87, kl_by_place=(0.02, 0.14)
)
BROKEN = quality(
    "half",
    2048.0,
    perplexity=float("inf"),
    perplexity_error=float("inf"),
    change_error=float("inf"),
    mean_kl=float("inf"),
    kl_error=float("inf"),
    p99_kl=float("inf"),
    p999_kl=float("inf"),
    max_kl=float("inf"),
    agreement=0.5,
    kl_by_place=(0.1, float("inf")),
    num_broken=1023,
)
