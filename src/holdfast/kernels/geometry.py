"""Sizes shared by kernels and plans: the fused decode path, blocks of experts, tiles of attention, chunks of a vocabulary; no torch.

S rows of a step, R rows processed together, V vocabulary, P chunks of it, B buckets of distances, C candidates
"""

from typing import NamedTuple

from holdfast.memory.workspace_plan import TensorSpec

FUSED_DECODE_ROWS = 16
"""Most rows of a step on the fused decode path. Above it, cuBLAS with separate norms, gates and sums is faster."""
QUANTIZED_DECODE_ROWS = 1
"""Like FUSED_DECODE_ROWS, for a dense model in row-scaled e4m3 on one rank. From two rows on, tiles with separate norms take
141 us a layer of 32B, and this path takes 164 (docs/log.md)."""
SMALL_BATCH_BLOCK_N = 64
"""Outputs per program of a small-batch GEMM, for two rows or more; widths on this path are multiples of it."""
GEMV_MIN_BLOCK_N = 2
"""Fewest outputs per program of a GEMV, for one row: each program writes one sum of squares."""
SPLIT_K_PROGRAMS = 128
"""About the SMs of a large GPU. A weight with fewer programs is split along K."""
SPLIT_K_COLUMNS = 2 * SPLIT_K_PROGRAMS * SMALL_BATCH_BLOCK_N
"""Upper bound of splits times outputs: splits double only until there are enough programs."""
NUM_GATE_AMAX = 64
"""Amax values per gated row: few to read, but enough that blocks seldom contend."""
ROW_SCALED_ROWS = 64
"""Most rows for Holdfast's row-scaled e4m3 tiles (kernels/gemm/row_scaled_tiles.py), which read weights faster than
torch's scaled product. With more rows, tensor cores are the limit and cuBLAS is faster."""
ROW_SCALED_SPLIT_ROWS = 128
"""Most rows if such a weight is split along K: cuBLAS does not split it, and its few outputs do not fill a GPU."""
ROW_SCALED_BLOCK_N, ROW_SCALED_BLOCK_K = 64, 128
"""Outputs per program of a row-scaled tile, and its columns per K step."""
ROW_SCALED_PROGRAMS = 132
"""SMs of a large GPU."""
MOST_ROW_SCALED_SPLITS = 8
LONG_SPLIT = 8192
"""Fewest columns of a split that justify two programs per SM: its partial sums then cost little."""


def row_scaled_splits(size_n: int, size_k: int) -> int:
    """Return the split-K of a row-scaled weight, from its shape alone: one program per SM, two if K is long."""
    num_blocks, k_blocks = -(-size_n // ROW_SCALED_BLOCK_N), -(-size_k // ROW_SCALED_BLOCK_K)
    wanted = max(
        -(-ROW_SCALED_PROGRAMS // num_blocks), min(2 * ROW_SCALED_PROGRAMS // num_blocks, size_k // LONG_SPLIT)
    )
    blocks_of_split = max(4, -(-k_blocks // min(wanted, MOST_ROW_SCALED_SPLITS)))
    return -(-k_blocks // blocks_of_split)


BLOCK_SCALED_ROWS, BLOCK_SCALED_BLOCK_N = 64, 64
"""Most rows, and outputs per program, of a block-scaled e4m3 tile (kernels/gemm/block_scaled_tiles.py)."""
MOST_BLOCK_SCALED_SPLITS, BLOCK_SCALED_STEPS = 4, 8
"""Most splits of a block-scaled weight along K, and fewest blocks of 128 columns in each."""


def block_scaled_splits(size_n: int, size_k: int) -> int:
    """Return the split-K of a block-scaled weight, from its shape alone: two programs per SM, of some blocks each."""
    num_blocks, k_blocks = -(-size_n // BLOCK_SCALED_BLOCK_N), -(-size_k // 128)
    wanted = min(MOST_BLOCK_SCALED_SPLITS, -(-2 * ROW_SCALED_PROGRAMS // num_blocks))
    blocks_of_split = max(BLOCK_SCALED_STEPS, -(-k_blocks // wanted))
    return -(-k_blocks // blocks_of_split)


LATENT_MULTIPLE, MAX_LATENT_DIM = 16, 512
"""Divisor and maximum of the latent elements (MLA) that kernels accept."""
LATENT_ROPE_DIMS = (16, 32, 64)
"""RoPE elements that kernels accept beside a latent."""
MAX_INDEX_HEADS = 64
"""Most index heads (DSA): one product takes them all."""
INDEX_MULTIPLE, MAX_INDEX_DIM = 16, 128
"""Divisor and maximum of the elements of an index head."""
MAX_DIRECT_TOKENS = 4
"""Most tokens that run one GEMV per pair: they hardly share experts, and a second read of a weight hits the cache."""
UNSORTED_TOKENS = 16
"""Most tokens whose pairs need no sort: they fit one block of rows."""
CUT_PAIRS = 2048
"""Most pairs of token and expert that one launch sorts. More are divided into such cuts, which are counted first."""
SMALL_BATCH_PAIRS, LARGE_BATCH_PAIRS = 256, 1024
"""Pairs per loop iteration of the sort, for small and for large batches."""


class ExpertOrderForm(NamedTuple):
    """Specialization of the sort of pairs of token and expert, from the number of tokens."""

    block_rows: int
    """Rows of a block; 1: one GEMV per pair."""
    is_sorted: bool
    """True if pairs are sorted into blocks. If False, the next fields are unused."""
    block_pairs: int
    """Pairs per loop iteration; 0: pairs are sorted in cuts."""
    is_whole: bool
    """True if the number of pairs is a multiple of 16: Triton then loads four ids at a time."""


def expert_order_form(num_rows: int, top_k: int, num_experts: int) -> ExpertOrderForm:
    """Return the specialization of the sort for this number of rows."""
    num_pairs, block_rows = num_rows * top_k, expert_block_rows(num_rows, top_k, num_experts)
    if not sorts_pairs(num_rows):
        return ExpertOrderForm(block_rows, is_sorted=False, block_pairs=0, is_whole=False)
    return ExpertOrderForm(block_rows, True, order_block_pairs(num_pairs), num_pairs % 16 == 0)


def order_block_pairs(num_pairs: int) -> int:
    """Return the pairs per loop iteration of the launch that sorts them; 0: they are sorted in cuts."""
    if num_pairs > CUT_PAIRS:
        return 0
    return SMALL_BATCH_PAIRS if num_pairs <= SMALL_BATCH_PAIRS else LARGE_BATCH_PAIRS


def sorts_pairs(num_rows: int) -> bool:
    """Return True if the pairs of this many tokens are sorted by expert."""
    return num_rows > UNSORTED_TOKENS


def expert_block_rows(num_rows: int, top_k: int, num_experts: int) -> int:
    """Return the rows of a block: near an expert's average, because each block reads its expert's weight."""
    if num_rows <= MAX_DIRECT_TOKENS:
        return 1
    if not sorts_pairs(num_rows):
        return UNSORTED_TOKENS
    pairs_per_expert = num_rows * top_k / num_experts
    return next((rows for rows, most in ((16, 8), (32, 24), (64, 96)) if pairs_per_expert <= most), 128)


def num_expert_blocks(num_pairs: int, num_experts: int, block_rows: int) -> int:
    """Return the most blocks for any choice of experts: each expert starts one, and the other pairs fill whole ones."""
    if block_rows == 1:
        return 0
    begun = min(num_pairs, num_experts)
    return begun + (num_pairs - begun) // block_rows


def order_specs(num_rows: int, top_k: int, num_experts: int, num_local: int | None = None) -> tuple[TensorSpec, ...]:
    """Return the tensors of `order_experts`: pairs, experts of blocks, and counts by cut.

    With expert parallelism a rank holds `num_local` experts. Block height is the same as on a single rank.
    """
    is_sorted, block_rows = sorts_pairs(num_rows), expert_block_rows(num_rows, top_k, num_experts)
    num_pairs, num_own = num_rows * top_k, num_experts if num_local is None else num_local
    num_blocks = num_expert_blocks(num_pairs, num_own, block_rows) if is_sorted else 0
    num_cuts = -(-num_pairs // CUT_PAIRS) if is_sorted and num_pairs > CUT_PAIRS else 0
    return (
        TensorSpec("expert pairs", (num_blocks, block_rows), "int32"),
        TensorSpec("block experts", (num_blocks,), "int32"),
        TensorSpec("expert counts", (num_cuts, num_own), "int32"),
    )


TILE_FIELDS = ("table_row", "row", "num_rows", "position", "low", "high", "first_partial", "num_splits")
"""Fields of a tile in a step's list (kernels/attention/tiled_attention.py)."""
NEAR_SPLIT = 2**16
"""With near tokens the last field is the splits of a row plus the number of this one times NEAR_SPLIT."""
BLOCK_TOKENS = 64
"""Tokens of KV that an attention kernel loads at once."""
LARGE_TILE = 128
"""Height of a large tile over plain pages: rows times heads of a GQA group. Also the largest group."""
QUANTIZED_LARGE_TILE = 64
"""Least height of a large tile over quantized pages. Tile lists are cut to this height."""


LANE_BYTES = 32 * 2**20
"""Most bytes of the lane (kernels/attention/lane_rows.py), unless one head of the longest context takes more."""
MOST_LANE_BYTES = 72 * 2**20
"""Most bytes of the lane for any context: one head of 131,072 tokens of 128, and exact tokens of a step beside them."""
LANE_TILE = 128
"""Height of a tile that reads the lane: rows times heads of a GQA group. Also the largest group."""
RUN_FIELDS = ("end", "table_row", "first_block", "low", "high", "is_near")
"""Fields of a run of tokens in the lane. `end`: blocks of its round up to its end."""
LANE_RUNS = 128
"""Most runs of a round: a program that fills the lane looks at all of them at once."""


class LaneGeometry(NamedTuple):
    """The lane as a kernel uses it, for the scheduler."""

    tile_rows: int
    """Most rows of a tile."""
    num_blocks: int
    """Blocks of BLOCK_TOKENS tokens of one KV head that fit."""
    num_kv_heads: int

    def heads(self, num_blocks: int) -> int:
        """Return the KV heads of a round, so that rounds are even; 0: these blocks of one head do not fit."""
        fitting = min(self.num_kv_heads, self.num_blocks // max(1, num_blocks))
        return -(-self.num_kv_heads // -(-self.num_kv_heads // fitting)) if fitting else 0


def lane_geometry(
    num_heads: int, num_kv_heads: int, head_dim: int, most_blocks: int | None = None, longest_blocks: int = 0
) -> LaneGeometry:
    """Return the geometry of a lane of LANE_BYTES, or of as many blocks of all heads as a step can need.

    `longest_blocks`, those of one head of the longest sequence, may raise it up to MOST_LANE_BYTES.
    """
    block_bytes = lane_block_bytes(head_dim)
    fitting = max(LANE_BYTES // block_bytes, min(longest_blocks, MOST_LANE_BYTES // block_bytes))
    num_blocks = fitting if most_blocks is None else min(fitting, most_blocks * num_kv_heads)
    return LaneGeometry(max(1, LANE_TILE // (num_heads // num_kv_heads)), num_blocks, num_kv_heads)


def lane_block_bytes(head_dim: int) -> int:
    """Return the bytes of a block of one head: each token has a row of keys and one of values, in half precision."""
    return 2 * 2 * head_dim * BLOCK_TOKENS


def lane_list_numbers(max_num_seqs: int) -> int:
    """Return the int32 numbers of the lane's lists: two runs and two starts of each sequence."""
    return 2 * max_num_seqs * (len(RUN_FIELDS) + 1)


def key_turn_dtype(dtype: str) -> str:
    """Return the type of `KeyTurns.near_2NC` for a model that computes in `dtype`."""
    return "float32" if dtype == "float32" else "float16"


def pair_columns(head_dim: int) -> int:
    """Return the pairs of a head's coordinates in a kernel: a power of two."""
    return max(16, 1 << (head_dim // 2 - 1).bit_length())


def key_turns_specs(head_dim: int, max_model_len: int, dtype: str) -> tuple[TensorSpec, ...]:
    """Return the tables of `KeyTurns`: one set for all layers with this head dim."""
    num_blocks = -(-max_model_len // BLOCK_TOKENS)
    return (
        TensorSpec("cos", (num_blocks, head_dim // 2), "float32"),
        TensorSpec("sin", (num_blocks, head_dim // 2), "float32"),
        TensorSpec("near", (2, BLOCK_TOKENS, head_dim // 2), key_turn_dtype(dtype)),
        TensorSpec("fragments", (2 * BLOCK_TOKENS * pair_columns(head_dim) if dtype != "float32" else 0,), "float16"),
    )


def key_bias_spec(num_kv_heads: int, head_dim: int) -> TensorSpec:
    """Return the tensor of each layer's `KeyBias`."""
    return TensorSpec("bias", (num_kv_heads, head_dim), "float32")


class TileGeometry(NamedTuple):
    """Tile sizes of a kernel, for the scheduler. Small tiles are for decode and short queries, large for prompts."""

    small_rows: int
    """Most rows of a small tile."""
    large_rows: int
    """Most rows of a large tile."""
    small_programs_per_sm: int
    large_programs_per_sm: int
    block_tokens: int
    """Tokens that a program loads at once. Splits are whole blocks, except the end of the last."""
    small_batch_rows: int = 0
    """Most rows of a step that runs `small_batch_programs_per_sm` programs for small tiles."""
    small_batch_programs_per_sm: int = 0
    """Programs for small tiles in such a step; unused if `small_batch_rows` is 0."""
    has_aligned_starts: bool = False
    """True if token ranges begin at multiples of `block_tokens`, even with a window: the kernel masks earlier
    tokens."""
    takes_whole_turns: bool = False
    """If True, cut small tiles to the least share that needs no more waves than unsplit tiles; else to the fair
    share."""
    tile_cost_tokens: int = 0
    """Cost of starting and ending a tile, in tokens. With it, more and shorter waves may finish sooner."""
    large_block_tokens: int = 0
    """Tokens that a program for large tiles loads at once: whole ones make a split; 0: `block_tokens`."""

    def small_programs(self, num_rows: int) -> int:
        """Return the programs per SM for a step's small tiles; `num_rows` includes padding."""
        return self.small_batch_programs_per_sm if num_rows <= self.small_batch_rows else self.small_programs_per_sm


CHUNK_TOKENS = 8192
"""Tokens of the vocabulary per program: few enough that a single row fills much of a GPU."""
NUM_BUCKETS = 128
"""Buckets of distances to the most likely token: sixteen per octave from 1/4 to 61, open at both ends."""
MAX_CANDIDATES = 4096
"""Most candidates in a row's list. If a row has more, kernels scan all of it."""
MAX_LOGIT_ROWS = 128
"""Most rows processed together: they fill a GPU, and bound the scratch for any number of sequences."""
EDITS_PER_PROGRAM = 256
"""Edits per program. Lists are padded to whole programs: a length argument would add specializations."""
NO_TOKEN = -1
"""Token id of a row that holds NaN or excludes every token."""


class LogitRow(NamedTuple):
    """Row of a float64 table, which holds these integers exactly. It has 64 bytes, so a table may begin at any row."""

    source: int = 0
    """Row of the logits to read."""
    target: int = 0
    """Row of the result to write."""
    negative_temperature: float = 0.0
    """Minus the temperature; 0: greedy."""
    min_p: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    """0: keep all tokens."""
    uniform: float = 0.0
    """Random number that selects the token."""
    is_blank: float = 0.0
    """1 if the copy starts as all -inf and allowed tokens are restored one by one."""


NUM_FIELDS = len(LogitRow._fields)


def num_chunks(vocab_size: int, chunk_tokens: int = CHUNK_TOKENS) -> int:
    """Return the chunks of a row; the last may be short."""
    return -(-vocab_size // chunk_tokens)


def logit_scratch_specs(max_rows: int, vocab_size: int) -> tuple[TensorSpec, ...]:
    """Return the tensors of `LogitScratch`: two for every row of a step, the others for rows processed together."""
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
