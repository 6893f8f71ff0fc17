"""Sizes shared by kernels and plans: the fused decode path, blocks of experts, tiles of attention, chunks of a vocabulary; no torch.

S rows of a step, R rows processed together, V vocabulary, P chunks of it, B buckets of distances, C candidates
"""

from typing import NamedTuple

from holdfast.memory.workspace_plan import TensorSpec

FUSED_DECODE_ROWS = 16
"""Most rows of a step on the fused decode path: above it cuBLAS with separate norms, gates and sums is faster."""
SMALL_BATCH_BLOCK_N = 64
"""Outputs per program of a small-batch GEMM, for two rows or more; widths on this path are multiples of it."""
GEMV_MIN_BLOCK_N = 2
"""Fewest outputs per program of a GEMV, for one row: each program writes one sum of squares."""
SPLIT_K_PROGRAMS = 128
"""About the multiprocessors of a large GPU: a weight with fewer programs is split along K."""
SPLIT_K_COLUMNS = 2 * SPLIT_K_PROGRAMS * SMALL_BATCH_BLOCK_N
"""Splits double only until there are enough programs, so splits times outputs stay below this."""
NUM_GATE_AMAX = 64
"""Places for the amax of a gated row: few to read, enough that blocks seldom contend."""
ROW_SCALED_ROWS = 64
"""Most rows for our tiles over row-scaled e4m3 weights (kernels/gemm/row_scaled_tiles.py), which read weights faster than
torch's scaled product. With more rows tensor cores are the limit, and cuBLAS is faster."""
ROW_SCALED_SPLIT_ROWS = 128
"""Most rows if such a weight is split along K: cuBLAS does not split it, and its few outputs do not fill a GPU."""
ROW_SCALED_BLOCK_N, ROW_SCALED_BLOCK_K = 64, 128
"""Outputs per program there, and columns that it multiplies at once."""
ROW_SCALED_PROGRAMS = 132
"""Multiprocessors of a large GPU."""
MOST_ROW_SCALED_SPLITS = 8
LONG_SPLIT = 8192
"""Columns from which a split is long relative to its partial sums, so two programs per multiprocessor pay."""


def row_scaled_splits(size_n: int, size_k: int) -> int:
    """Return the split-K of such a weight from its shape: one program per multiprocessor, two if K is long."""
    num_blocks, k_blocks = -(-size_n // ROW_SCALED_BLOCK_N), -(-size_k // ROW_SCALED_BLOCK_K)
    wanted = max(
        -(-ROW_SCALED_PROGRAMS // num_blocks), min(2 * ROW_SCALED_PROGRAMS // num_blocks, size_k // LONG_SPLIT)
    )
    blocks_of_split = max(4, -(-k_blocks // min(wanted, MOST_ROW_SCALED_SPLITS)))
    return -(-k_blocks // blocks_of_split)


LATENT_MULTIPLE, MAX_LATENT_DIM = 16, 512
"""Kernels take latents (MLA) of a multiple of so many elements, and at most so many."""
LATENT_ROPE_DIMS = (16, 32, 64)
"""Rotated elements beside them."""
MAX_INDEX_HEADS = 64
"""Most heads of an index (DSA): all are in one product."""
INDEX_MULTIPLE, MAX_INDEX_DIM = 16, 128
"""Their elements: a multiple, and at most so many."""
MAX_DIRECT_TOKENS = 4
"""So few tokens hardly share experts: a weight that two of them read is cached the second time."""
UNSORTED_TOKENS = 16
"""So few tokens fit one block of rows, so pairs need no sort."""
CUT_PAIRS = 2048
"""Pairs of token and expert per program: more are cut and counted in a separate launch."""
SMALL_BATCH_PAIRS, LARGE_BATCH_PAIRS = 256, 1024
"""That are looked at at a time."""


class ExpertOrderForm(NamedTuple):
    """What of the launches that sort pairs of token and expert follows from the number of tokens."""

    block_rows: int
    """1: a GEMV for each pair."""
    is_sorted: bool
    """Pairs are sorted into blocks; else the next fields are unused."""
    block_pairs: int
    """Pairs per block of a loop."""
    block_cuts: int
    """A power of two, at least the number of cuts."""
    is_whole: bool
    """Pairs are a multiple of 16, so ids load four at a time: a Triton specialization."""


def expert_order_form(num_rows: int, top_k: int, num_experts: int, cut_pairs: int = CUT_PAIRS) -> ExpertOrderForm:
    """Return the launch-dependent sizes of a step."""
    num_pairs = num_rows * top_k
    block_rows, num_cuts = expert_block_rows(num_rows, top_k, num_experts), -(-num_pairs // cut_pairs)
    if not sorts_pairs(num_rows):
        return ExpertOrderForm(block_rows, is_sorted=False, block_pairs=0, block_cuts=0, is_whole=False)
    return ExpertOrderForm(
        block_rows,
        True,
        SMALL_BATCH_PAIRS if num_pairs <= SMALL_BATCH_PAIRS else LARGE_BATCH_PAIRS,
        1 << (num_cuts - 1).bit_length(),
        num_pairs % 16 == 0,
    )


def sorts_pairs(num_rows: int) -> bool:
    """True if pairs of so many tokens are sorted by expert."""
    return num_rows > UNSORTED_TOKENS


def expert_block_rows(num_rows: int, top_k: int, num_experts: int) -> int:
    """Rows of a block: near an expert's average, because each block reads its expert's weight."""
    if num_rows <= MAX_DIRECT_TOKENS:
        return 1
    if not sorts_pairs(num_rows):
        return UNSORTED_TOKENS
    pairs_per_expert = num_rows * top_k / num_experts
    return next((rows for rows, most in ((16, 8), (32, 24), (64, 96)) if pairs_per_expert <= most), 128)


def num_expert_blocks(num_pairs: int, num_experts: int, block_rows: int) -> int:
    """Most blocks of any choice of experts: each expert starts one, and the other pairs fill whole ones."""
    if block_rows == 1:
        return 0
    begun = min(num_pairs, num_experts)
    return begun + (num_pairs - begun) // block_rows


def order_specs(num_rows: int, top_k: int, num_experts: int, num_local: int | None = None) -> tuple[TensorSpec, ...]:
    """Return the tensors of `order_experts`: pairs, experts of blocks, and counts by cut.

    With expert parallelism a rank holds `num_local` experts; blocks have the height of a single rank's.
    """
    is_sorted, block_rows = sorts_pairs(num_rows), expert_block_rows(num_rows, top_k, num_experts)
    num_pairs, num_own = num_rows * top_k, num_experts if num_local is None else num_local
    num_blocks = num_expert_blocks(num_pairs, num_own, block_rows) if is_sorted else 0
    num_cuts = -(-num_pairs // CUT_PAIRS) if is_sorted else 0
    return (
        TensorSpec("expert pairs", (num_blocks, block_rows), "int32"),
        TensorSpec("block experts", (num_blocks,), "int32"),
        TensorSpec("expert counts", (num_cuts if num_cuts > 1 else 0, num_own), "int32"),
    )


TILE_FIELDS = ("table_row", "row", "num_rows", "position", "low", "high", "first_partial", "num_splits")
"""Fields of a tile in a step's list (kernels/attention/tiled_attention.py)."""
BLOCK_TOKENS = 64
"""Stored tokens that an attention kernel takes at once."""
LARGE_TILE = 128
"""Rows times heads of a GQA group in a large tile over plain pages; also the largest group."""
QUANTIZED_LARGE_TILE = 64
"""Least height of a large tile over quantized pages: lists hold tiles of this height."""


def key_turn_dtype(dtype: str) -> str:
    """Return the type of `KeyTurns.near_2NC` for a model that computes in `dtype`."""
    return "float32" if dtype == "float32" else "float16"


def pair_columns(head_dim: int) -> int:
    """Pairs of a head's coordinates in a kernel: a power of two."""
    return max(16, 1 << (head_dim // 2 - 1).bit_length())


def key_turns_specs(head_dim: int, max_model_len: int, dtype: str) -> tuple[TensorSpec, ...]:
    """The tables of `KeyTurns`, one set for all layers of a head dim."""
    num_blocks = -(-max_model_len // BLOCK_TOKENS)
    return (
        TensorSpec("cos", (num_blocks, head_dim // 2), "float32"),
        TensorSpec("sin", (num_blocks, head_dim // 2), "float32"),
        TensorSpec("near", (2, BLOCK_TOKENS, head_dim // 2), key_turn_dtype(dtype)),
        TensorSpec("fragments", (2 * BLOCK_TOKENS * pair_columns(head_dim) if dtype != "float32" else 0,), "float16"),
    )


def key_bias_spec(num_kv_heads: int, head_dim: int) -> TensorSpec:
    """The tensor of each layer's `KeyBias`."""
    return TensorSpec("bias", (num_kv_heads, head_dim), "float32")


class TileGeometry(NamedTuple):
    """A kernel as the tile scheduler sees it. Small tiles are for decode and short queries, large ones for prompts."""

    small_rows: int
    """Most rows of a small tile."""
    large_rows: int
    """Most rows of a large tile."""
    small_programs_per_sm: int
    large_programs_per_sm: int
    block_tokens: int
    """Tokens that a program takes at once: splits are whole blocks, except the end of the last."""
    small_batch_rows: int = 0
    """Steps of at most so many rows run fewer programs for small tiles ..."""
    small_batch_programs_per_sm: int = 0
    """... which are these; unused if small_batch_rows is 0."""
    has_aligned_starts: bool = False
    """Token ranges begin at multiples of block_tokens, also with a window: the kernel masks earlier tokens."""
    takes_whole_turns: bool = False
    """Small tiles are cut so the last wave of programs has no few remainders; else to the nearest fair share."""
    tile_cost_tokens: int = 0
    """Start and end of a tile, in tokens: more and shorter waves may then finish sooner."""

    def small_programs(self, num_rows: int) -> int:
        """Programs per multiprocessor for the small tiles of a step; rows include padding."""
        return self.small_batch_programs_per_sm if num_rows <= self.small_batch_rows else self.small_programs_per_sm


CHUNK_TOKENS = 8192
"""Tokens per program: a single row still fills much of a GPU."""
NUM_BUCKETS = 128
"""Buckets of distances below the most likely token: sixteen per octave from 1/4 to 61, open at both ends."""
MAX_CANDIDATES = 4096
"""Most candidates of a row in a list; a row with more is processed as a whole."""
MAX_LOGIT_ROWS = 128
"""Most rows processed together: they fill a GPU, and their scratch does not grow with the sequences."""
EDITS_PER_PROGRAM = 256
"""Edits per program. A list has whole programs: as an argument, its length would add specializations."""
NO_TOKEN = -1
"""Replaces a token id if the row holds NaN or excludes every token."""


class LogitRow(NamedTuple):
    """One row of a table in float64, which is exact for these integers. A row is 64 bytes, so a table may begin at any."""

    source: int = 0
    """The row of the logits."""
    target: int = 0
    """The row of the result."""
    negative_temperature: float = 0.0
    """0 takes the most likely token."""
    min_p: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps all."""
    uniform: float = 0.0
    """The random number."""
    is_blank: float = 0.0
    """1 if a copy of the row starts without tokens: allowed ones are restored one by one."""


NUM_FIELDS = len(LogitRow._fields)


def num_chunks(vocab_size: int, chunk_tokens: int = CHUNK_TOKENS) -> int:
    """Chunks of a row; the last may be short."""
    return -(-vocab_size // chunk_tokens)


def logit_scratch_specs(max_rows: int, vocab_size: int) -> tuple[TensorSpec, ...]:
    """The tensors of `LogitScratch`: the first two for every row of a step, the others for rows processed together."""
    rows, chunks = min(max_rows, MAX_LOGIT_ROWS), num_chunks(vocab_size)
    candidates = min(vocab_size, MAX_CANDIDATES)
    return (
        TensorSpec("chunk_largest", (max_rows, chunks), "float32"),
        TensorSpec("chunk_argmax", (max_rows, chunks), "int32"),
        TensorSpec("chunk_weights", (rows, chunks), "int64"),
        TensorSpec("chunk_nearer", (rows, chunks), "int32"),
        TensorSpec("chunk_counts", (rows, chunks, NUM_BUCKETS), "int32"),
        TensorSpec("num_listed", (rows,), "int32"),
        TensorSpec("listed_logits", (rows, candidates), "float32"),
        TensorSpec("listed_ids", (rows, candidates), "int32"),
    )
