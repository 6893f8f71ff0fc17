"""Which files of a repository are needed, by the names of all its files."""

from error_codes import raises_code
from for_each import for_each
from holdfast.errors import ModelNotFoundError, UnsupportedModelError
from holdfast.loading.hub.choose import (
    choose_gguf,
    gguf_models,
    refuse_without_weights,
    settings_files,
    takes_gguf,
    weight_files,
)
from holdfast.loading.hub.names import HubName, parse_hub_name

MANY = [
    "README.md",
    "Qwen3-8B-Q4_K_M.gguf",
    "Qwen3-8B-Q8_0.gguf",
    "Qwen3-8B-UD-Q4_K_XL.gguf",
    "mmproj-F16.gguf",
    "imatrix_unsloth.gguf",
    "BF16/Qwen3-8B-BF16-00001-of-00002.gguf",
    "BF16/Qwen3-8B-BF16-00002-of-00002.gguf",
]


def chosen(text, files=MANY):
    name = parse_hub_name(text)
    assert name is not None
    return choose_gguf(name, gguf_models(files), "the Hub")


@for_each(
    "tag, files",
    [
        ("Q8_0", ("Qwen3-8B-Q8_0.gguf",)),
        ("q8_0", ("Qwen3-8B-Q8_0.gguf",)),
        ("UD-Q4_K_XL", ("Qwen3-8B-UD-Q4_K_XL.gguf",)),
        ("Q4_K_XL", ("Qwen3-8B-UD-Q4_K_XL.gguf",)),
        ("bf16", tuple(MANY[-2:])),
    ],
)
def test_choose_gguf_by_tag_finds_its_files(tag, files):
    choice = chosen(f"a/b:{tag}")
    assert choice.model.files == files
    assert choice.model.is_whole
    assert choice.others == ()


def test_choose_gguf_without_tag_takes_the_usual_one():
    choice = chosen("a/b")
    assert choice.model.files == ("Qwen3-8B-Q4_K_M.gguf",)
    assert choice.others == ("BF16", "Q8_0", "UD-Q4_K_XL")


def test_choose_gguf_takes_the_only_model_file():
    assert chosen("a/b", ["weights.gguf", "mmproj.gguf"]).model.files == ("weights.gguf",)
    assert chosen("a/b", ["smollm2-135m.Q4_1.gguf"]).model.tag == "Q4_1"


def test_choose_gguf_by_file_name_takes_all_its_parts():
    assert chosen(f"a/b/{MANY[-1]}").model.files == tuple(MANY[-2:])


@for_each(
    "text, files, words",
    [
        ("a/b:Q5_K_M", MANY, "the Hub has BF16, Q4_K_M, Q8_0, UD-Q4_K_XL. Write a/b:BF16"),
        ("a/b:K_M", MANY, "the Hub has BF16"),
        ("a/b:Q4_0", ["model.safetensors"], "the Hub has no GGUF file"),
        ("a/b", ["x-IQ1_S.gguf", "x-IQ1_M.gguf"], "Write a/b:IQ1_M"),
    ],
)
def test_choose_gguf_unknown_tag_lists_available_ones(text, files, words):
    with raises_code("hub.no_quantization", ModelNotFoundError) as caught:
        chosen(text, files)
    assert words in str(caught.value)


def test_gguf_models_with_a_missing_part_is_not_whole():
    model = gguf_models(["x-Q8_0-00001-of-00003.gguf", "x-Q8_0-00003-of-00003.gguf"])[0]
    assert (model.num_parts, model.is_whole) == (3, False)


def test_gguf_models_drops_part_numbers_out_of_range():
    """Nor is one with the number 0; files of another count are another model."""
    parts = [f"x-Q8_0-{number:05}-of-00002.gguf" for number in (0, 2, 1, 3)]
    (model, other) = gguf_models([*parts, "x-Q8_0-00001-of-00003.gguf"])
    assert model.files == ("x-Q8_0-00001-of-00002.gguf", "x-Q8_0-00002-of-00002.gguf")
    assert model.is_whole
    assert (other.num_parts, other.is_whole) == (3, False)


def test_choose_gguf_takes_the_shortest_name_with_the_tag():
    files = ["m-instruct-Q8_0.gguf", "m-Q8_0.gguf", "m-long-Q8_0.gguf", "m-Q4_0.gguf"]
    assert chosen("a/b:Q8_0", files).model.files == ("m-Q8_0.gguf",)
    assert chosen("a/b", ["m-b-Q4_0.gguf", "m-a-Q4_0.gguf"]).model.files == ("m-a-Q4_0.gguf",)


FOLDER = {
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt"),
    *("model.safetensors.index.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"),
    *("consolidated.safetensors", "pytorch_model.bin", "original/params.json", "original/consolidated.00.pth"),
    *("onnx/model.onnx", "README.md", ".gitattributes", "tf_model.h5", "model.fp16.safetensors"),
}


def test_settings_and_weight_files_list_only_needed_files():
    shards = ("model-00002-of-00002.safetensors", "model-00001-of-00002.safetensors")
    needed = (*settings_files(FOLDER), *weight_files(FOLDER, shards))
    assert needed == (
        *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
        *("model.safetensors.index.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"),
    )
    assert weight_files(FOLDER | {"model.safetensors"}, ()) == ("model.safetensors",)
    saved = {"config.json", "holdfast-weights.json", "model-00001.safetensors"}
    assert weight_files(saved, ()) == ("holdfast-weights.json", "model-00001.safetensors")


def test_takes_gguf_prefers_safetensors_by_default():
    both, gguf = {"model.safetensors", "x-Q8_0.gguf"}, {"x-Q8_0.gguf", "config.json"}
    assert not takes_gguf(HubName("a/b"), both)
    assert takes_gguf(HubName("a/b", tag="Q8_0"), both)
    assert takes_gguf(HubName("a/b"), both, "gguf")
    assert takes_gguf(HubName("a/b"), gguf)
    assert takes_gguf(HubName("a/b"), gguf, "dummy")
    assert not takes_gguf(HubName("a/b"), both, "dummy")
    assert not takes_gguf(HubName("a/b"), gguf, "safetensors")


def test_refuse_without_weights_pickles_are_refused_before_fetch():
    with raises_code("weights.pickle", UnsupportedModelError):
        refuse_without_weights(HubName("facebook/opt-125m"), {"config.json", "pytorch_model.bin"})
    with raises_code("hub.no_weights", ModelNotFoundError):
        refuse_without_weights(HubName("a/b"), {"config.json"})
    refuse_without_weights(HubName("a/b"), FOLDER)
