"""Shapes and bytes of what a step is laid out in: rows, and on a GPU the page table; no torch."""

from holdfast.config import Limits
from holdfast.memory.planner import Term
from holdfast.memory.tensor_spec import ALIGNMENT_BYTES, TensorSpec
from holdfast.quant.formats import DTYPE_BYTES

# T rows of a step, N sequences, P pages of the longest one, U changed pages

LISTED_PAGES = 16
"""Most new pages of one sequence that reach the device in a list; the list has room for as many of every sequence."""

_REASONS = {
    "token_ids": "one a row of a step",
    "positions": "one a row of a step",
    "slots": "one a row of a step",
    "logit_rows": "one a row of a step",
    "page_table": "pages of every sequence of a step, at its longest",
    "page_updates": f"what changed in the page table, up to {LISTED_PAGES} pages a sequence",
}


def batch_terms(limits: Limits, device_kind: str = "cpu") -> tuple[Term, ...]:
    """Bytes of the input buffers, and of the page table where kernels read one; `device_kind` is cpu or cuda."""
    specs = input_specs(limits) if device_kind == "cpu" else input_specs(limits) + page_table_specs(limits)
    return tuple(map(input_term, specs))


def input_term(spec: TensorSpec) -> Term:
    """The line of one buffer in plan and ledger."""
    return Term(f"inputs/{spec.name}", spec.num_bytes, _REASONS[spec.name])


def input_specs(limits: Limits) -> tuple[TensorSpec, ...]:
    """The buffers with an entry a row. They lie one behind the other, and their length makes each begin aligned."""
    per_unit = ALIGNMENT_BYTES // DTYPE_BYTES["int64"]
    shape_T = (-(-limits.max_num_batched_tokens // per_unit) * per_unit,)
    return tuple(TensorSpec(name, shape_T, "int64") for name in ("token_ids", "positions", "slots", "logit_rows"))


def page_table_specs(limits: Limits) -> tuple[TensorSpec, TensorSpec]:
    """The table, and the list of what changed in it: (place in the table, page) in each entry."""
    shape_NP = (limits.max_num_seqs, -(-limits.max_model_len // limits.page_tokens))
    shape_U2 = (limits.max_num_seqs * LISTED_PAGES, 2)
    return TensorSpec("page_table", shape_NP, "int32"), TensorSpec("page_updates", shape_U2, "int64")
