"""What an exchange holds on a rank, by owner, from shapes: rooms that peers read, logits, signals; no torch.

exchange/rows      two rooms that take turns (sums and gathers of rows, of expert pairs, of tokens)
exchange/gathered  of collectives (gloo, NCCL): the parts of all ranks, before they are added up or laid side by side
exchange/logits    this rank's share of the logits where peers read it; on rank 0 the whole as well
exchange/signals   who has written and who has read
exchange/rounding  of symmetric memory: what the driver adds to the whole of it
pipeline/hidden    rows on their way between stages
sampling/shares    beside an exchange, of who chooses: the argmax of every share and its logit
collectives/nccl   what NCCL takes for its communicator; measured; 0 on one node
"""

from typing import Literal, NamedTuple

from holdfast.distributed.mesh import Mesh
from holdfast.memory.planner import PAGE_PHASES, Term
from holdfast.memory.workspace_plan import TensorSpec, aligned, arena_bytes

ExchangeKind = Literal["symmetric", "gloo", "nccl"]
"""Symmetric memory among GPUs of a node, gloo among CPUs, NCCL between nodes."""
SIGNAL_BYTES = 2**14
NCCL_BYTES = 560 * 2**20
"""Measured on an H200 for one rank (NCCL 2.28.9): 558 MiB when it is made, 2 more when a graph captures it."""


SYMMETRIC_UNIT_BYTES = 2 * 2**20
"""In which the driver gives out memory that other processes may map."""
TORCH_SIGNAL_BYTES = 2048
"""Which torch keeps beside every symmetric allocation, for collectives of its own."""
LOCAL_OWNERS = ("exchange/whole_logits",)
"""What peers do not read."""


def can_be_captured(kind: ExchangeKind, mesh: Mesh) -> bool:
    """Whether a CUDA graph may hold a rank's calls: all of those over symmetric memory; of NCCL's not the rows between stages."""
    return mesh.is_alone or kind == "symmetric" or (kind == "nccl" and mesh.num_stages == 1)


class ExchangeNeeds(NamedTuple):
    """What the steps of a model exchange at their largest."""

    room_bytes: int
    """Of the largest part that goes through a room."""
    num_logit_rows: int
    vocab_size: int
    """Of the whole model."""
    hidden_bytes: int
    """Of the rows that go from a stage to the next."""

    def vocab_share(self, mesh: Mesh) -> int:
        """Columns of logits of every rank but the last, which may have fewer."""
        return -(-self.vocab_size // mesh.tensor_size)


def exchange_specs(needs: ExchangeNeeds, mesh: Mesh, kind: ExchangeKind) -> dict[str, TensorSpec]:
    """The tensors by owner; an exchange allocates exactly these, and nothing where there is one rank."""
    found: dict[str, TensorSpec] = {}
    if mesh.tensor_size > 1:
        room = aligned(needs.room_bytes)
        found["exchange/rows"] = TensorSpec("rows", (2, room), "uint8")
        if kind != "symmetric":
            found["exchange/gathered"] = TensorSpec("gathered", (mesh.tensor_size, room), "uint8")
    # On rank 0 they go through here as well; symmetric memory is as large on every rank.
    if (mesh.is_last_stage or mesh.rank == 0 or kind == "symmetric") and not mesh.is_alone:
        share = needs.num_logit_rows * needs.vocab_share(mesh)
        found["exchange/logits"] = TensorSpec("logits", (share,), "float32")
    if mesh.rank == 0 and not mesh.is_alone:
        found["exchange/whole_logits"] = TensorSpec("whole_logits", (needs.num_logit_rows, needs.vocab_size), "float32")
    if not mesh.is_alone:
        found["exchange/signals"] = TensorSpec("signals", (SIGNAL_BYTES,), "uint8")
    if mesh.num_stages > 1:
        found["pipeline/hidden"] = TensorSpec("hidden", (mesh.num_stages, aligned(needs.hidden_bytes)), "uint8")
    return found


def shared_specs(needs: ExchangeNeeds, mesh: Mesh) -> dict[str, TensorSpec]:
    """Those that lie in symmetric memory, one behind the other: the same on every rank."""
    specs = exchange_specs(needs, mesh, "symmetric")
    return {owner: spec for owner, spec in specs.items() if owner not in LOCAL_OWNERS}


def rounding_bytes(needs: ExchangeNeeds, mesh: Mesh) -> int:
    """What symmetric memory takes beside its tensors."""
    num_bytes = arena_bytes(shared_specs(needs, mesh).values())
    return -(-(num_bytes + TORCH_SIGNAL_BYTES) // SYMMETRIC_UNIT_BYTES) * SYMMETRIC_UNIT_BYTES - num_bytes


CHOICE_FIELDS = 2
"""Of a row and a share: the id of its argmax, and the logit; float32, in which ids below 2**24 are exact."""


def choice_specs(needs: ExchangeNeeds, mesh: Mesh) -> tuple[TensorSpec, TensorSpec]:
    """What a choice among shares of the vocabulary holds: of its own share, and of all of them."""
    rows = needs.num_logit_rows
    own = TensorSpec("own", (rows, CHOICE_FIELDS), "float32")
    return own, TensorSpec("all", (mesh.tensor_size * rows * CHOICE_FIELDS,), "float32")


def exchange_terms(needs: ExchangeNeeds, mesh: Mesh, kind: ExchangeKind) -> tuple[Term, ...]:
    """Lines of the plan."""
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
    if kind == "symmetric" and not mesh.is_alone:
        reason = "memory that peers map comes in pieces of 2 MiB"
        terms.append(Term("exchange/rounding", rounding_bytes(needs, mesh), reason, PAGE_PHASES))
    if not mesh.is_alone:
        num_bytes = sum(spec.num_bytes for spec in choice_specs(needs, mesh))
        terms.append(Term("sampling/shares", num_bytes, "the argmax of every share of the vocabulary", PAGE_PHASES))
    if kind == "nccl" and not mesh.is_alone:
        terms.append(Term("collectives/nccl", NCCL_BYTES, "NCCL's communicator; measured on one H200"))
    return tuple(terms)
