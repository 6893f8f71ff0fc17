"""Bytes of well-known models, by hand: shapes that their makers published, multiplied here, against what a plan counts.

The third number of a row is the count that the makers, or the Hub, state for the model; it checks the arithmetic.
"""

from math import prod
from typing import NamedTuple

import pytest

from holdfast.models.blueprints.read import declare_config
from holdfast.models.catalogue import CATALOGUE
from holdfast.models.declared_model import DeclaredModel


class Shape(NamedTuple):
    """A decoder in the words of its config.json."""

    vocab: int
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int


def embeddings(shape: Shape, *, tied: bool) -> int:
    """The table of tokens, a head like it unless they are one, and the last norm."""
    return shape.vocab * shape.hidden * (1 if tied else 2) + shape.hidden


def attention(shape: Shape) -> int:
    """Queries, keys and values, and the way back."""
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return shape.hidden * queries + 2 * shape.hidden * keys + queries * shape.hidden


def qkv_bias(shape: Shape) -> int:
    return (shape.heads + 2 * shape.kv_heads) * shape.head_dim


def mlp(shape: Shape) -> int:
    """Gate, up and down."""
    return 3 * shape.hidden * shape.inner


def llama(shape: Shape, *, tied: bool = False) -> int:
    """Two norms a layer, no biases."""
    return embeddings(shape, tied=tied) + shape.layers * (attention(shape) + mlp(shape) + 2 * shape.hidden)


def kv(shape: Shape) -> int:
    """Keys and values of a token in two bytes each."""
    return shape.layers * 2 * shape.kv_heads * shape.head_dim * 2


LLAMA2_7B = Shape(32000, 4096, 11008, 32, 32, 32, 128)
LLAMA2_70B = Shape(32000, 8192, 28672, 80, 64, 8, 128)
LLAMA31_8B = Shape(128256, 4096, 14336, 32, 32, 8, 128)
LLAMA33_70B = Shape(128256, 8192, 28672, 80, 64, 8, 128)
LLAMA31_405B = Shape(128256, 16384, 53248, 126, 128, 8, 128)
LLAMA32_1B = Shape(128256, 2048, 8192, 16, 32, 8, 64)
MISTRAL_V01 = Shape(32000, 4096, 14336, 32, 32, 8, 128)
NEMO = Shape(131072, 5120, 14336, 40, 32, 8, 128)
SMALL = Shape(131072, 5120, 32768, 40, 32, 8, 128)
QWEN25_7B = Shape(152064, 3584, 18944, 28, 28, 4, 128)
DISTILL_15B = Shape(151936, 1536, 8960, 28, 12, 2, 128)
QWEN3_4B = Shape(151936, 2560, 9728, 36, 32, 8, 128)
QWEN3_32B = Shape(151936, 5120, 25600, 64, 64, 8, 128)
QWEN3_30B = Shape(151936, 2048, 768, 48, 32, 4, 128)
QWEN3_235B = Shape(151936, 4096, 1536, 94, 64, 4, 128)
CODER_480B = Shape(151936, 6144, 2560, 62, 96, 8, 128)
MIXTRAL = Shape(32000, 4096, 14336, 32, 32, 8, 128)
PHI4 = Shape(100352, 5120, 17920, 40, 40, 10, 128)
PHI4_MINI = Shape(200064, 3072, 8192, 32, 24, 8, 128)
GEMMA3_1B = Shape(262144, 1152, 6912, 26, 4, 1, 256)
GEMMA3_27B = Shape(262208, 5376, 21504, 62, 32, 16, 128)
GPT_OSS = Shape(201088, 2880, 2880, 24, 64, 8, 64)
GLM4_9B = Shape(151552, 4096, 13696, 40, 32, 2, 128)
GLM45_AIR = Shape(151552, 4096, 1408, 46, 96, 8, 128)

SIGLIP = (
    (3 * 14 * 14 * 1152 + 1152)  # patches
    + (896 // 14) ** 2 * 1152  # positions
    + 27 * (4 * (1152 * 1152 + 1152) + 1152 * 4304 + 4304 + 4304 * 1152 + 1152 + 2 * 2 * 1152)
    + 2 * 1152  # the last norm
)
PIXTRAL = 3 * 14 * 14 * 1024 + 1024 + 24 * (4 * 1024 * 1024 + 3 * 1024 * 4096 + 2 * 1024)


def qwen2(shape: Shape, *, tied: bool) -> int:
    return llama(shape, tied=tied) + shape.layers * qkv_bias(shape)


def qwen3(shape: Shape, *, tied: bool = False) -> int:
    """A norm of queries and one of keys."""
    return llama(shape, tied=tied) + shape.layers * 2 * shape.head_dim


def qwen3_moe(shape: Shape, num_experts: int) -> int:
    """`inner` is that of one expert; the router has a row for each."""
    layer = attention(shape) + 2 * shape.head_dim + 2 * shape.hidden
    return embeddings(shape, tied=False) + shape.layers * (
        layer + num_experts * mlp(shape) + num_experts * shape.hidden
    )


def gemma3(shape: Shape) -> int:
    """Four norms a layer, a norm of queries and one of keys, one table for tokens and head."""
    layer = attention(shape) + mlp(shape) + 4 * shape.hidden + 2 * shape.head_dim
    return embeddings(shape, tied=True) + shape.layers * layer


def gpt_oss(shape: Shape, num_experts: int) -> int:
    """Biases everywhere, and a sink a head."""
    layer = attention(shape) + qkv_bias(shape) + shape.hidden + shape.heads + 2 * shape.hidden
    router = num_experts * shape.hidden + num_experts
    expert = mlp(shape) + 2 * shape.inner + shape.hidden
    return embeddings(shape, tied=False) + shape.layers * (layer + router + num_experts * expert)


def deepseek(num_dense: int, num_experts: int, vocab: int, heads: int) -> int:
    """V3 and what took its shapes: 61 layers of 7168; latents of 1536 and 512, 64 rotated, heads of 128."""
    latent = 7168 * 1536 + 1536 + 1536 * heads * 192 + 7168 * 576 + 512 + 512 * heads * 256 + heads * 128 * 7168
    dense = num_dense * 3 * 7168 * 18432
    sparse = (61 - num_dense) * ((num_experts + 1) * 3 * 7168 * 2048 + num_experts * 7168 + num_experts)
    return 2 * vocab * 7168 + 7168 + 61 * (latent + 2 * 7168) + dense + sparse


def glm5(num_indexed: int) -> int:
    """78 layers of 6144, 64 heads of 192 + 64 and 256; latents of 2048 and 512; so many have an index of 32 heads of 128."""
    latent = 6144 * 2048 + 2048 + 2048 * 64 * 256 + 6144 * 576 + 512 + 512 * 64 * 448 + 64 * 256 * 6144
    index = 2048 * 32 * 128 + 6144 * 128 + 2 * 128 + 32 * 6144
    sparse = 75 * (257 * 3 * 6144 * 2048 + 256 * 6144 + 256)
    layers = 78 * (latent + 2 * 6144) + num_indexed * index + 3 * 3 * 6144 * 12288 + sparse
    return 2 * 154880 * 6144 + 6144 + layers


class Row(NamedTuple):
    """What was multiplied by hand."""

    parameters: int
    kv_bytes_per_token: int
    published: int | None
    """As others state it; None where no source does to the last digit."""


V2_LITE = (
    2 * 102400 * 2048
    + 2048
    + 27 * (2048 * 16 * 192 + 2048 * 576 + 512 + 512 * 16 * 256 + 16 * 128 * 2048 + 2 * 2048)
    + 3 * 2048 * 10944
    + 26 * ((64 + 2) * 3 * 2048 * 1408 + 64 * 2048)
)
V2_FULL = (
    2 * 102400 * 5120
    + 5120
    + 60 * (5120 * 1536 + 1536 + 1536 * 128 * 192 + 5120 * 576 + 512 + 512 * 128 * 256 + 128 * 128 * 5120 + 2 * 5120)
    + 3 * 5120 * 12288
    + 59 * ((160 + 2) * 3 * 5120 * 1536 + 160 * 5120)
)
MOONLIGHT = V2_LITE + 2 * (163840 - 102400) * 2048 + 3 * 2048 * (11264 - 10944) + 26 * 64  # a bias on every score
GLM47_FLASH = (
    2 * 154880 * 2048
    + 2048
    + 47 * (2048 * 768 + 768 + 768 * 20 * 256 + 2048 * 576 + 512 + 512 * 20 * 448 + 20 * 256 * 2048 + 2 * 2048)
    + 3 * 2048 * 10240
    + 46 * ((64 + 1) * 3 * 2048 * 1536 + 64 * 2048 + 64)
)
GLM45_AIR_LAYER = attention(GLM45_AIR) + qkv_bias(GLM45_AIR) + 2 * 4096
GPT_OSS_120B = GPT_OSS._replace(layers=36)
BY_HAND: dict[str, Row] = {
    "Llama-2-7b-hf": Row(llama(LLAMA2_7B), kv(LLAMA2_7B), 6_738_415_616),
    "Llama-2-70b-hf": Row(llama(LLAMA2_70B), kv(LLAMA2_70B), 68_976_648_192),
    "Llama-3.1-8B": Row(llama(LLAMA31_8B), 131_072, 8_030_261_248),
    "Llama-3.3-70B-Instruct": Row(llama(LLAMA33_70B), 327_680, 70_553_706_496),
    "Llama-3.1-405B": Row(llama(LLAMA31_405B), 516_096, 405_853_388_800),
    "Llama-3.2-1B": Row(llama(LLAMA32_1B, tied=True), 32_768, 1_235_814_400),
    "Mistral-7B-v0.1": Row(llama(MISTRAL_V01), 131_072, 7_241_732_096),
    "Mistral-Nemo-Instruct-2407": Row(llama(NEMO), 163_840, 12_247_782_400),
    "Mistral-Small-24B-Instruct-2501": Row(llama(SMALL), 163_840, 23_572_403_200),
    "Mistral-Small-3.2-24B-Instruct-2506": Row(
        llama(SMALL) + PIXTRAL + 1024 + 4 * 1024 * 1024 + 1024 * 5120 + 5120 * 5120, kv(SMALL), 24_011_361_280
    ),
    "Qwen2.5-7B-Instruct": Row(qwen2(QWEN25_7B, tied=False), 57_344, 7_615_616_512),
    "DeepSeek-R1-Distill-Qwen-1.5B": Row(qwen2(DISTILL_15B, tied=False), 28_672, 1_777_088_000),
    "Qwen3-4B-Instruct-2507": Row(qwen3(QWEN3_4B, tied=True), 147_456, 4_022_468_096),
    "Qwen3-32B": Row(qwen3(QWEN3_32B), 262_144, 32_762_123_264),
    "Qwen3-30B-A3B": Row(qwen3_moe(QWEN3_30B, 128), 98_304, 30_532_122_624),
    "Qwen3-235B-A22B": Row(qwen3_moe(QWEN3_235B, 128), kv(QWEN3_235B), 235_093_634_560),
    "Qwen3-Coder-480B-A35B-Instruct": Row(qwen3_moe(CODER_480B, 160), kv(CODER_480B), 480_154_875_392),
    "Mixtral-8x7B-v0.1": Row(llama(MIXTRAL) + 32 * (7 * mlp(MIXTRAL) + 8 * 4096), 131_072, 46_702_792_704),
    "phi-4": Row(llama(PHI4), 204_800, 14_659_507_200),
    "Phi-4-mini-instruct": Row(llama(PHI4_MINI, tied=True), 131_072, 3_836_021_760),
    "gemma-3-1b-it": Row(gemma3(GEMMA3_1B), kv(GEMMA3_1B), 999_885_952),
    "gemma-3-27b-it": Row(  # what sees images is not loaded
        gemma3(GEMMA3_27B), kv(GEMMA3_27B), 27_432_406_640 - (SIGLIP + 1152 * 5376 + 1152)
    ),
    "gpt-oss-20b": Row(gpt_oss(GPT_OSS, 32), kv(GPT_OSS), 20_914_757_184),
    "gpt-oss-120b": Row(gpt_oss(GPT_OSS_120B, 128), kv(GPT_OSS_120B), 116_829_156_672),
    "glm-4-9b-chat-hf": Row(llama(GLM4_9B) + 40 * qkv_bias(GLM4_9B), 40_960, 9_399_951_360),
    "GLM-4-9B-0414": Row(llama(GLM4_9B) + 40 * (qkv_bias(GLM4_9B) + 2 * 4096), 40_960, 9_400_279_040),
    "GLM-4.5-Air": Row(
        embeddings(GLM45_AIR, tied=False)
        + 46 * GLM45_AIR_LAYER
        + 3 * 4096 * 10944  # the first layer is dense
        + 45 * (129 * mlp(GLM45_AIR) + 128 * 4096 + 128),
        kv(GLM45_AIR),
        106_852_245_504 + 45 * 128,  # which leaves out what corrects the router
    ),
    "GLM-4.7-Flash": Row(GLM47_FLASH, 47 * 1152, None),
    "GLM-5": Row(glm5(78), 78 * (1152 + 256), None),
    "GLM-5.2": Row(glm5(21), 78 * 1152 + 21 * 256, None),
    "DeepSeek-V2-Lite": Row(V2_LITE, 27 * 1152, 15_706_484_224),
    "DeepSeek-V2": Row(V2_FULL, 60 * 1152, None),
    "Moonlight-16B-A3B": Row(MOONLIGHT, 27 * 1152, None),
    "DeepSeek-V3": Row(deepseek(3, 256, 129280, 128), 61 * 1152, 671_026_404_352 + 58 * 256),
    "Kimi-K2-Instruct": Row(deepseek(1, 384, 163840, 64), 61 * 1152, None),
}


def declared(name: str) -> DeclaredModel:
    return declare_config(CATALOGUE[name], name)


def test_weight_bytes_by_hand_cover_twenty_models() -> None:
    assert len(BY_HAND) >= 20


@pytest.mark.parametrize("name", BY_HAND)
def test_parameters_and_bytes_by_hand(name: str) -> None:
    row, config = BY_HAND[name], CATALOGUE[name]
    assert row.published in (None, row.parameters), "the arithmetic of this file is wrong"
    plain = declare_config({**config, "quantization_config": None}, name)
    weights = [weight for weight in plain.parameters() if weight.group != "mtp"]
    assert sum(prod(weight.shape) for weight in weights) == row.parameters
    in_float32 = sum(prod(weight.shape) for weight in weights if weight.dtype == "float32")
    planned = plain.weight_bytes("bfloat16") - sum(
        group.num_bytes for group_name, group in plain.group_bytes("bfloat16").items() if group_name == "mtp"
    )
    padding = planned - 2 * (row.parameters + in_float32)
    assert 0 <= padding < 256 * len(weights), "every tensor begins at a multiple of 256 bytes"
    assert plain.kv_bytes_per_token("bfloat16") == row.kv_bytes_per_token
    assert plain.kv_bytes_per_sequence("bfloat16") == 0


V3_DRAFT_BYTES = 257 * 3 * 7168 * 2048 + 187e6 + 2 * (2 * 129280 * 7168 + 2 * 7168 * 7168)
"""Experts and attention in one byte, and in two the embedding, the head and what joins both streams."""


@pytest.mark.parametrize(
    ("name", "num_bytes"),
    [
        ("gpt-oss-20b", 13.761e9),  # what its files have
        ("gpt-oss-120b", 65.249e9),
        ("DeepSeek-V3", 688.59e9 - V3_DRAFT_BYTES + 61 * 128 * 256 * 512),  # kv_b is two bytes wide here
        ("Kimi-K2-Instruct", 1_029.2e9),
    ],
)
def test_weight_bytes_of_quantized_checkpoints_match_files(name: str, num_bytes: float) -> None:
    found = declared(name)
    assert found.weight_bytes(found.checkpoint_dtype) == pytest.approx(num_bytes, rel=0.005)
