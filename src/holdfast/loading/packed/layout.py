"""PackedLayout: how a checkpoint packs a matrix of 4-bit or 8-bit codes, as a value; the formats as rows; no torch.

N outputs, K inputs, J groups of inputs that share a scale, P codes in a word; plain weight = (code - zero) * scale

format              codes                      scales                   zero points
AWQ                 int32 [K, N / P]           [J, N]                   int32 [J, N / P], packed alike
GPTQ                int32 [K / P, N]           [J, N]                   int32 [J, N / P]; v1 stores one less
pack-quantized      int32 [N, K / P]           [N, J]                   int32 [N / P, J]; none: the middle code
int-quantized       int8 [N, K]                [N, J], [N] or one       int8, like the scales; none: 0
nvfp4               uint8 [N, K / 2], e2m1     e4m3 [N, J] and one      none
mxfp4               uint8 [N, K / 2], e2m1     e8m0 [N, J]              none
fp8                 e4m3 [N, K]                [N], one, or by block    none

A module may have a group for each input (`g_idx`, act-order), so that groups are no runs of inputs.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from holdfast.quant.formats import DTYPE_BYTES

Numbers = Literal["unsigned", "signed", "e2m1", "e4m3"]
"""What a code is: an integer from 0, an integer around 0, or a float."""
Zeros = Literal["none", "words", "words_less_one", "middle", "plain"]
"""Zero points: none; packed like codes; packed, each stored one less (GPTQ v1); the middle code; numbers like scales."""
FLOATS = ("float16", "bfloat16", "float32")
BLOCK = 128
"""Rows and columns of a block of fp8."""


class PackedFormat(NamedTuple):
    """One format: the names, types and axes of its tensors."""

    name: str
    """Key of the functions that read it."""
    title: str
    numbers: Numbers
    codes: str
    """Suffix that a module's name gets, like those below."""
    code_dtype: str
    scales: tuple[str, ...]
    """Suffixes of its scales, of which the first that exists counts."""
    scale_dtypes: tuple[str, ...]
    zeros: str = ""
    second: str = ""
    """Suffix of the one scale of all scales."""
    divides: bool = False
    """The second scale divides."""
    groups: str = ""
    """Suffix of the group of each input."""
    is_input_major: bool = False
    """True if tensors are stored as [K, N], inputs as rows."""
    packs_inputs: bool = True
    """A word holds codes of consecutive inputs; else of outputs."""
    fields: tuple[int, ...] = ()
    """The field of a word that holds each code, from the low bits; empty: in order."""
    has_short_group: bool = False
    """The last group may be shorter than the others."""


AWQ_FIELDS = (0, 4, 1, 5, 2, 6, 3, 7)
AWQ = PackedFormat(
    "awq",
    "AWQ",
    "unsigned",
    ".qweight",
    "int32",
    (".scales",),
    FLOATS,
    zeros=".qzeros",
    is_input_major=True,
    packs_inputs=False,
    fields=AWQ_FIELDS,
)
GPTQ = PackedFormat(
    "gptq",
    "GPTQ",
    "unsigned",
    ".qweight",
    "int32",
    (".scales",),
    FLOATS,
    zeros=".qzeros",
    groups=".g_idx",
    is_input_major=True,
    has_short_group=True,
)
PACKED_INT = PackedFormat(
    "packed_int",
    "pack-quantized",
    "unsigned",
    ".weight_packed",
    "int32",
    (".weight_scale",),
    FLOATS,
    zeros=".weight_zero_point",
    groups=".weight_g_idx",
)
INT8 = PackedFormat(
    "int8", "int-quantized", "signed", ".weight", "int8", (".weight_scale",), FLOATS, zeros=".weight_zero_point"
)
NVFP4 = PackedFormat(
    "nvfp4",
    "NVFP4 (nvfp4-pack-quantized)",
    "e2m1",
    ".weight_packed",
    "uint8",
    (".weight_scale",),
    ("float8_e4m3fn",),
    second=".weight_global_scale",
    divides=True,
)
MODELOPT_NVFP4 = NVFP4._replace(title="NVFP4 (ModelOpt)", codes=".weight", second=".weight_scale_2", divides=False)
MXFP4 = PackedFormat("mxfp4", "mxfp4-pack-quantized", "e2m1", ".weight_packed", "uint8", (".weight_scale",), ("uint8",))
FP8 = PackedFormat("fp8", "fp8", "e4m3", ".weight", "float8_e4m3fn", (".weight_scale", ".weight_scale_inv"), FLOATS)


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """A format with its numbers of bits and inputs, as settings declare it."""

    format: PackedFormat
    bits: int
    group_size: int
    """Inputs that share a scale; 0: all, or as the shape of the scales says if the format leaves that open."""
    zeros: Zeros = "none"
    has_order: bool = False
    """True if the settings declare act-order."""
    may_be_middle: bool = False
    """True if the settings declare symmetric modules beside those with zero points: the words tell them apart."""

    @property
    def codes_per_word(self) -> int:
        """A byte holds one code of fewer bits, too."""
        if self.format.numbers in ("signed", "e4m3"):
            return 1
        return 8 * DTYPE_BYTES[self.format.code_dtype] // self.bits

    @property
    def middle(self) -> int:
        """The code that stands for 0 without zero points."""
        return 2 ** (self.bits - 1) if self.format.numbers == "unsigned" else 0

    @property
    def title(self) -> str:
        """Its name for people: GPTQ of 4 bits in groups of 128."""
        groups = f" in groups of {self.group_size}" if self.group_size else ""
        return (
            self.format.title if self.bits == 8 and not groups else f"{self.format.title} of {self.bits} bits{groups}"
        )

    def num_groups(self, num_columns: int) -> int:
        return -(-num_columns // self.group_size) if self.group_size else 1

    def indivisible(self, num_rows: int, num_columns: int) -> str | None:
        """Return why no matrix of this shape is stored so; None if one can be."""
        if self.group_size and num_columns % self.group_size and not self.format.has_short_group:
            return f"{num_columns} inputs are not made of groups of {self.group_size}"
        packed = num_columns if self.format.packs_inputs else num_rows
        if self.format.is_input_major and packed % self.codes_per_word:
            what = "inputs" if self.format.packs_inputs else "outputs"
            return f"{packed} {what} do not fill words of {self.codes_per_word} codes"
        return None

    def code_shape(self, num_rows: int, num_columns: int) -> tuple[int, int]:
        """Return the shape of the codes of a matrix."""
        each = self.codes_per_word
        if self.format.packs_inputs:
            num_columns = -(-num_columns // each)
        else:
            num_rows = -(-num_rows // each)
        return (num_columns, num_rows) if self.format.is_input_major else (num_rows, num_columns)

    def matrix_shape(self, code_shape: tuple[int, ...]) -> tuple[int, int]:
        """Return rows and columns of a matrix with such codes; the last word counts as full."""
        num_rows, num_columns = code_shape[::-1] if self.format.is_input_major else code_shape
        each = self.codes_per_word
        return (num_rows, num_columns * each) if self.format.packs_inputs else (num_rows * each, num_columns)

    def scale_shapes(self, num_rows: int, num_columns: int) -> dict[tuple[int, ...], tuple[int, int]]:
        """Return the possible shapes of scales; for each, the rows and columns that share one."""
        groups, size = self.num_groups(num_columns), self.group_size or num_columns
        if self.format.is_input_major:
            return {(groups, num_rows): (1, size)}
        by_group: dict[tuple[int, ...], tuple[int, int]] = {(num_rows, groups): (1, size)}
        if self.group_size or self.format.numbers not in ("signed", "e4m3"):
            return by_group
        one = (num_rows, num_columns)
        found = by_group | {(num_rows,): (1, num_columns), (): one, (1,): one, (1, 1): one}
        if self.format.numbers == "e4m3":
            found.setdefault((-(-num_rows // BLOCK), -(-num_columns // BLOCK)), (BLOCK, BLOCK))
        return found

    def zero_shape(self, num_rows: int, num_columns: int, scales: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the zero points beside scales of a shape."""
        if self.zeros == "plain":
            return scales
        groups, words = self.num_groups(num_columns), -(-num_rows // self.codes_per_word)
        return (groups, words) if self.format.is_input_major else (words, groups)
