"""Memory of an exchange on a rank, by owner, from shapes: buffers that peers read, logits, signals; no torch.

exchange/rows      two alternating buffers (all-reduce and all-gather of rows, expert pairs, tokens)
exchange/gathered  for gloo and NCCL: the parts of all ranks
exchange/logits    this rank's share of the logits, readable by peers; on rank 0 also the whole
exchange/signals   which ranks have written and read
exchange/rounding  of symmetric memory: rounding by the driver
pipeline/hidden    rows between stages
sampling/shares    on the sampling rank: the argmax of every share and its logit
collectives/nccl   NCCL's communicators, measured; 0 on one node
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from holdfast.distributed.mesh import Mesh
from holdfast.memory.planner import PAGE_PHASES, Term
from holdfast.memory.workspace_plan import TensorSpec, aligned, arena_bytes

ExchangeKind = Literal["symmetric", "gloo", "nccl", "linked"]
"""Symmetric memory on a node, gloo among CPUs, NCCL between nodes; linked: symmetric within a stage, NCCL between."""
NODE_GPUS = 8
"""GPUs that read each other's memory."""
SIGNAL_BYTES = 2**14
NCCL_CONNECT_BYTES = 186 * 2**20
NCCL_CALLS_BYTES = 186 * 2**20
NCCL_HEAD_BYTES = 4 * 2**20
"""Memory of NCCL 2.28.9 on an H200: at connection, after every call, and for a second communicator. In engines, 2 and 4
ranks as nodes, and two stages, took 370, 370 and 376 MiB each: mostly code, so independent of the number of ranks. (In
an otherwise idle process a first send adds 58 MiB, which kernels of an engine have already taken.)"""
SYMMETRIC_UNIT_BYTES = 2 * 2**20
"""Granularity of memory that other processes may map."""
TORCH_SIGNAL_BYTES = 2048
"""Torch's own signals beside every symmetric allocation."""
LOCAL_OWNERS = ("exchange/whole_logits",)
"""Owners that peers do not read."""


def can_be_captured(kind: ExchangeKind, mesh: Mesh) -> bool:
    """True if a CUDA graph may capture a rank's calls: symmetric memory always, NCCL without stages."""
    return mesh.is_alone or kind == "symmetric" or (kind == "nccl" and mesh.num_stages == 1)


def find_exchange(device_kind: str, nodes: Sequence[object], tensor_size: int) -> ExchangeKind:
    """Choose how ranks exchange; `nodes`: the node of each rank, in order."""
    if device_kind == "cpu":
        return "gloo"
    if len(set(nodes)) == 1:
        return "symmetric"
    stages = [set(nodes[start : start + tensor_size]) for start in range(0, len(nodes), tensor_size)]
    return "linked" if tensor_size > 1 and all(len(stage) == 1 for stage in stages) else "nccl"


def planned_nodes(num_ranks: int, num_nodes: int | None) -> list[int]:
    """Spread ranks evenly over nodes; None: as many as have NODE_GPUS each."""
    num_nodes = num_nodes or -(-num_ranks // NODE_GPUS)
    return [rank * num_nodes // num_ranks for rank in range(num_ranks)]


class ExchangeNeeds(NamedTuple):
    """The largest exchanges of a model's steps."""

    room_bytes: int
    """Largest part in a buffer."""
    num_logit_rows: int
    vocab_size: int
    """Vocabulary of the whole model."""
    hidden_bytes: int
    """Rows between two stages."""

    def vocab_share(self, mesh: Mesh) -> int:
        """Logit columns of every rank but the last, which may have fewer."""
        return -(-self.vocab_size // mesh.tensor_size)


def exchange_specs(needs: ExchangeNeeds, mesh: Mesh, kind: ExchangeKind) -> dict[str, TensorSpec]:
    """Return the tensors of an exchange by owner; none for one rank."""
    found: dict[str, TensorSpec] = {}
    if mesh.tensor_size > 1:
        room = aligned(needs.room_bytes)
        found["exchange/rows"] = TensorSpec("rows", (2, room), "uint8")
        if kind in ("gloo", "nccl"):
            found["exchange/gathered"] = TensorSpec("gathered", (mesh.tensor_size, room), "uint8")
    has_logits = not mesh.is_alone and needs.num_logit_rows > 0
    # Rank 0 uses it too; symmetric memory has one size on every rank.
    if (mesh.is_last_stage or mesh.rank == 0 or kind == "symmetric") and has_logits:
        share = needs.num_logit_rows * needs.vocab_share(mesh)
        found["exchange/logits"] = TensorSpec("logits", (share,), "float32")
    if mesh.rank == 0 and has_logits:
        found["exchange/whole_logits"] = TensorSpec("whole_logits", (needs.num_logit_rows, needs.vocab_size), "float32")
    if not mesh.is_alone:
        found["exchange/signals"] = TensorSpec("signals", (SIGNAL_BYTES,), "uint8")
    if mesh.num_stages > 1:
        found["pipeline/hidden"] = TensorSpec("hidden", (mesh.num_stages, aligned(needs.hidden_bytes)), "uint8")
    return found


def shared_specs(needs: ExchangeNeeds, mesh: Mesh) -> dict[str, TensorSpec]:
    """Return the tensors in symmetric memory, equal on every rank."""
    specs = exchange_specs(needs, mesh, "symmetric")
    return {owner: spec for owner, spec in specs.items() if owner not in LOCAL_OWNERS}


def in_stage(needs: ExchangeNeeds, mesh: Mesh) -> tuple[ExchangeNeeds, Mesh]:
    """Return needs and mesh within one stage of a linked exchange: no logits, no rows between stages."""
    return needs._replace(num_logit_rows=0), mesh.all_layers


def rounding_bytes(needs: ExchangeNeeds, mesh: Mesh) -> int:
    """Return bytes of symmetric memory beside its tensors."""
    num_bytes = arena_bytes(shared_specs(needs, mesh).values())
    return -(-(num_bytes + TORCH_SIGNAL_BYTES) // SYMMETRIC_UNIT_BYTES) * SYMMETRIC_UNIT_BYTES - num_bytes


CHOICE_FIELDS = 2
"""The id of a share's argmax and its logit, in float32: ids below 2**24 are exact."""


def choice_specs(needs: ExchangeNeeds, mesh: Mesh) -> tuple[TensorSpec, TensorSpec]:
    """Return the tensors for sampling by shares: of this rank's share, and of all."""
    rows = needs.num_logit_rows
    own = TensorSpec("own", (rows, CHOICE_FIELDS), "float32")
    return own, TensorSpec("all", (mesh.tensor_size * rows * CHOICE_FIELDS,), "float32")


NCCL_REASON = "NCCL's communicators; measured on an H200"


def nccl_bytes(mesh: Mesh) -> int:
    """Return NCCL's memory on a rank after every call."""
    has_head = mesh.num_stages > 1 and (mesh.is_last_stage or mesh.rank == 0)
    return NCCL_CONNECT_BYTES + NCCL_CALLS_BYTES + (NCCL_HEAD_BYTES if has_head else 0)


def exchange_terms(needs: ExchangeNeeds, mesh: Mesh, kind: ExchangeKind) -> tuple[Term, ...]:
    """Return the exchange's plan terms."""
    reasons = {
        "exchange/rows": "two rooms in which peers read parts of products",
        "exchange/gathered": f"parts of {mesh.tensor_size} ranks",
        "exchange/logits": f"logits of a share of the vocabulary, of {needs.num_logit_rows} rows",
        "exchange/whole_logits": "logits of the whole vocabulary, on the rank that chooses",
        "exchange/signals": "who has written, who has read",
        "pipeline/hidden": f"rows on their way between {mesh.num_stages} stages",
    }
    terms = [
        Term(owner, spec.aligned_bytes, reasons[owner], PAGE_PHASES)
        for owner, spec in exchange_specs(needs, mesh, kind).items()
    ]
    if kind in ("symmetric", "linked") and not mesh.is_alone:
        reason = "memory that peers map comes in pieces of 2 MiB"
        shared = (needs, mesh) if kind == "symmetric" else in_stage(needs, mesh)
        terms.append(Term("exchange/rounding", rounding_bytes(*shared), reason, PAGE_PHASES))
    if not mesh.is_alone:
        num_bytes = sum(spec.num_bytes for spec in choice_specs(needs, mesh))
        terms.append(Term("sampling/shares", num_bytes, "the argmax of every share of the vocabulary", PAGE_PHASES))
    if kind in ("nccl", "linked") and not mesh.is_alone:
        terms.append(Term("collectives/nccl", nccl_bytes(mesh), NCCL_REASON, PAGE_PHASES))
    return tuple(terms)
