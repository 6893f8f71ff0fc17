"""What aligning the planes of the KV cache can cost, as a term of the plan; no torch."""

from math import gcd

from holdfast.cache.spec import CacheSpec
from holdfast.memory.planner import KV_OWNER, PAGE_PHASES, Term
from holdfast.memory.tensor_spec import ALIGNMENT_BYTES


def kv_padding_term(spec: CacheSpec) -> Term:
    """The most that lies unused behind planes, whatever the number of pages: nothing where whole pages are aligned."""
    page_bytes = [spec.page_tokens * plane.bytes_per_token for layer in spec.layers for plane in layer.planes]
    padding_bytes = sum(ALIGNMENT_BYTES - gcd(num_bytes, ALIGNMENT_BYTES) for num_bytes in page_bytes)
    reason = f"{len(page_bytes)} planes, each at a multiple of {ALIGNMENT_BYTES} bytes"
    return Term(f"{KV_OWNER}/padding", padding_bytes, reason, PAGE_PHASES)
