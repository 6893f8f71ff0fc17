"""Sizes that kernels and plans agree on, each stated once: the fused decode path, blocks of experts, tiles of attention, chunks of a vocabulary; no torch.

S rows of a step, R rows that are worked on together, V vocabulary, P chunks of it, B buckets of distances, C candidates
"""

from typing import NamedTuple

from holdfast.memory.workspace_plan import TensorSpec

FUSED_DECODE_ROWS = 16
"""Most rows of a step on the fused decode path: beyond it cuBLAS is faster, with norms, gates and sums as kernels of their own."""
SMALL_BATCH_BLOCK_N = 64
"""Outputs of a program of a small-batch GEMM, which two rows and more take; widths on this path are multiples of it."""
GEMV_MIN_BLOCK_N = 2
"""Fewest outputs of a program of a GEMV, which one row takes: each program leaves one sum of squares."""
SPLIT_K_PROGRAMS = 128
"""About as many as a large GPU has multiprocessors: with fewer some of them idle, so a weight of few outputs is split along K."""
SPLIT_K_COLUMNS = 2 * SPLIT_K_PROGRAMS * SMALL_BATCH_BLOCK_N
"""Splits are doubled only until there are enough programs, so splits times outputs stay below this."""
NUM_GATE_AMAX = 64
"""Places for the amax of a gated row: few to read, and enough that blocks seldom wait for one another."""
ROW_SCALED_ROWS = 64
"""Most rows by e4m3 weights with scales by row that go through our own tiles (kernels/gemm/row_scaled_tiles.py), which read
weights faster than torch's scaled product does; beyond it the tensor cores are the limit, and cuBLAS feeds them better."""
ROW_SCALED_SPLIT_ROWS = 128
"""Most rows where such a weight is split along K: it has too few outputs for cuBLAS, which does not split it, to fill a GPU."""
ROW_SCALED_BLOCK_N, ROW_SCALED_BLOCK_K = 64, 128
"""Outputs of a program there, and columns that it multiplies at a time."""
ROW_SCALED_PROGRAMS = 132
"""The multiprocessors of a large GPU: with fewer programs some of them idle."""
MOST_ROW_SCALED_SPLITS = 8
LONG_SPLIT = 8192
"""Columns of a split that is long beside its partial sums, so that a second program a multiprocessor pays."""


def row_scaled_splits(size_n: int, size_k: int) -> int:
    """Splits along K (split-K) of such a weight, by its shape alone: a program for every multiprocessor, two where K is long."""
    num_blocks, k_blocks = -(-size_n // ROW_SCALED_BLOCK_N), -(-size_k // ROW_SCALED_BLOCK_K)
    wanted = max(
        -(-ROW_SCALED_PROGRAMS // num_blocks), min(2 * ROW_SCALED_PROGRAMS // num_blocks, size_k // LONG_SPLIT)
    )
    blocks_of_split = max(4, -(-k_blocks // min(wanted, MOST_ROW_SCALED_SPLITS)))
    return -(-k_blocks // blocks_of_split)


LATENT_MULTIPLE, MAX_LATENT_DIM = 16, 512
"""Latents (MLA) that kernels take have a multiple of so many elements, and at most so many."""
LATENT_ROPE_DIMS = (16, 32, 64)
"""Rotated elements that may stand beside them."""
MAX_INDEX_HEADS = 64
"""Heads of an index (DSA), which stand side by side in one product: kernels take up to so many."""
INDEX_MULTIPLE, MAX_INDEX_DIM = 16, 128
"""Their elements: a multiple of so many, and at most so many."""
MAX_DIRECT_TOKENS = 4
"""Up to so many tokens hardly share experts: a weight that two of them read comes out of the cache the second time."""
UNSORTED_TOKENS = 16
"""Up to so many tokens fit into one block of rows, so an expert's are found among all of them, and no pairs are sorted."""
CUT_PAIRS = 2048
"""Pairs of token and expert that one program looks through: more of them are cut, and counted in a launch of their own."""
SMALL_BATCH_PAIRS, LARGE_BATCH_PAIRS = 256, 1024
"""That are looked at at a time."""


class ExpertOrderForm(NamedTuple):
    """What of the launches that sort pairs of token and expert follows from the number of tokens."""

    block_rows: int
    """1: a GEMV for each pair."""
    is_sorted: bool
    """Pairs are sorted into blocks; else what follows is not looked at."""
    block_pairs: int
    """Pairs that are looked at at a time."""
    block_cuts: int
    """A power of two that the cuts are not more than."""
    is_whole: bool
    """Pairs are a multiple of 16, and ids are loaded four at a time: Triton compiles for it by itself."""


def expert_order_form(num_rows: int, top_k: int, num_experts: int, cut_pairs: int = CUT_PAIRS) -> ExpertOrderForm:
    """The form of a step of so many tokens."""
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
    """Whether pairs of so many tokens are sorted by expert."""
    return num_rows > UNSORTED_TOKENS


def expert_block_rows(num_rows: int, top_k: int, num_experts: int) -> int:
    """Rows of a block: near what an expert gets on average, because a block costs the reading of its expert's weight."""
    if num_rows <= MAX_DIRECT_TOKENS:
        return 1
    if not sorts_pairs(num_rows):
        return UNSORTED_TOKENS
    pairs_per_expert = num_rows * top_k / num_experts
    return next((rows for rows, most in ((16, 8), (32, 24), (64, 96)) if pairs_per_expert <= most), 128)


def num_expert_blocks(num_pairs: int, num_experts: int, block_rows: int) -> int:
    """The most blocks that any choice of experts can take: every expert begins one, and the other pairs fill whole ones."""
    if block_rows == 1:
        return 0
    begun = min(num_pairs, num_experts)
    return begun + (num_pairs - begun) // block_rows


def order_specs(num_rows: int, top_k: int, num_experts: int, num_local: int | None = None) -> tuple[TensorSpec, ...]:
    """What `order_experts` needs for so many tokens: pairs, experts of blocks, and counts by cut.

    Of all experts a rank may hold `num_local` (expert parallelism): blocks are as high as one rank's would be.
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
"""Of a tile in a step's list (kernels/attention/tiled_attention.py)."""
BLOCK_TOKENS = 64
"""Stored tokens that an attention kernel takes at once."""
LARGE_TILE = 128
"""Rows of queries times heads of a GQA group in a large tile over plain pages, which is also the largest group."""
QUANTIZED_LARGE_TILE = 64
"""The least that a large tile over quantized pages has: lists have room for tiles of this height."""


def key_turn_dtype(dtype: str) -> str:
    """Of the small table of kernels/attention/key_bias.py, in a model that computes in `dtype`: kernels multiply in half precision."""
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
    """What `KeyBias` holds of each layer."""
    return TensorSpec("bias", (num_kv_heads, head_dim), "float32")


class TileGeometry(NamedTuple):
    """What the tile scheduler must know of a kernel. Small tiles are for decoding and short queries, large ones for prompts."""

    small_rows: int
    """Most rows of a small tile."""
    large_rows: int
    """Most rows of a large tile."""
    small_programs_per_sm: int
    large_programs_per_sm: int
    block_tokens: int
    """Tokens that a program takes at once: splits are whole blocks, but for the end of the last one."""
    small_batch_rows: int = 0
    """Steps of at most so many rows run fewer programs for small tiles ..."""
    small_batch_programs_per_sm: int = 0
    """... which are these; not looked at where small_batch_rows is 0."""
    has_aligned_starts: bool = False
    """Token ranges begin at multiples of block_tokens, also behind a window: the kernel masks what comes too early."""
    takes_whole_turns: bool = False
    """Small tiles are cut so that the last turn of the programs is not for a few remainders; else to the nearest fair share."""
    tile_cost_tokens: int = 0
    """What beginning and ending a tile costs, in tokens: turns may then be more and shorter where all is done sooner so."""

    def small_programs(self, num_rows: int) -> int:
        """Programs a multiprocessor for the small tiles of a step of so many rows, padding included."""
        return self.small_batch_programs_per_sm if num_rows <= self.small_batch_rows else self.small_programs_per_sm


CHUNK_TOKENS = 8192
"""Tokens of one program: a lone row still fills a good part of a GPU."""
NUM_BUCKETS = 128
"""Of distances below the most likely token: sixteen to an octave from 1/4 to 61, the first and the last open."""
MAX_CANDIDATES = 4096
"""Most tokens of a row that are listed by themselves; a row that keeps more is worked on as a whole."""
MAX_LOGIT_ROWS = 128
"""Most rows that are worked on together: enough to fill a GPU, and what they take does not grow with the sequences."""
EDITS_PER_PROGRAM = 256
"""A list of edits comes in whole programs: as an argument its length would be compiled for in several ways."""
NO_TOKEN = -1
"""In place of a token id: the row holds NaN, or rules every token out."""


class LogitRow(NamedTuple):
    """One row of a table, in float64: whole numbers of this size are exact in it.

    A row is 64 bytes, so that a table may begin at any of them.
    """

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
    """1 where a copy of the row begins without any token: those that may be chosen are put back one by one."""


NUM_FIELDS = len(LogitRow._fields)


def num_chunks(vocab_size: int, chunk_tokens: int = CHUNK_TOKENS) -> int:
    """Chunks of a row, the last of which may be short."""
    return -(-vocab_size // chunk_tokens)


def logit_scratch_specs(max_rows: int, vocab_size: int) -> tuple[TensorSpec, ...]:
    """What `LogitScratch` holds: the first two for every row of a step, the others for rows that are worked on together."""
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
