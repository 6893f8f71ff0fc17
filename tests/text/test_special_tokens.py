import json

import pytest

from holdfast.errors import ModelFormatError
from holdfast.text.tokenizer import TokenEntry, special_tokens_of


def write(folder, **files):
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return special_tokens_of(folder)


def test_a_folder_without_files_says_nothing(tmp_path):
    tokens = special_tokens_of(tmp_path)
    assert (tokens.texts(), tokens.extra, tokens.added, tokens.are_plain_text) == ({}, (), None, False)


def test_names_are_read_as_strings_and_as_entries(tmp_path):
    config = {
        "bos_token": "<s>",
        "eos_token": {"content": "</s>", "lstrip": True, "__type": "AddedToken"},
        "pad_token": None,
        "image_token": "<image>",
        "add_bos_token": True,
        "odd_token": {"no": "content"},
        "model_max_length": 1000000000000000019884624838656,
    }
    tokens = write(tmp_path, tokenizer_config=config)
    assert tokens.texts() == {"bos_token": "<s>", "eos_token": "</s>", "image_token": "<image>"}
    assert tokens.named["eos_token"].flags == {"lstrip": True}


def test_the_list_by_id_decides_over_the_map(tmp_path):
    entry = {"content": "<s>", "special": True, "rstrip": True}
    config = {"bos_token": "<s>", "added_tokens_decoder": {"5": entry}}
    tokens = write(tmp_path, tokenizer_config=config, special_tokens_map={"bos_token": "<other>"})
    assert tokens.named["bos_token"] == tokens.added[5] == TokenEntry("<s>", {"special": True, "rstrip": True})


def test_the_map_decides_where_there_is_no_list(tmp_path):
    tokens = write(
        tmp_path,
        tokenizer_config={"bos_token": "<s>", "eos_token": "</s>"},
        special_tokens_map={"eos_token": "<end>", "additional_special_tokens": ["<x>"]},
        added_tokens={"<end>": 7, "<word>": 8},
    )
    assert tokens.texts() == {"bos_token": "<s>", "eos_token": "<end>"}
    assert tokens.extra == (TokenEntry("<x>"),)
    assert tokens.added[7].flags["special"]
    assert not tokens.added[8].flags["special"]


def test_special_tokens_can_be_plain_text(tmp_path):
    assert write(tmp_path, tokenizer_config={"split_special_tokens": True}).are_plain_text


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config": {"bos_token": ["<s>"]}},
        {"tokenizer_config": {"extra_special_tokens": "<x>"}},
        {"tokenizer_config": {"added_tokens_decoder": {"1": "<s>"}, "x": 1, "bos_token": 2}},
        {"special_tokens_map": {"eos_token": 3}},
        {"added_tokens": {"<a>": "7"}},
        {"added_tokens": {"<a>": -1}},
        {"added_tokens": {"<a>": True}},
    ],
    ids=lambda files: json.dumps(files)[:60],
)
def test_wrong_types_are_refused_in_words(tmp_path, files):
    with pytest.raises(ModelFormatError, match=r"\.json says .* a token is needed there"):
        write(tmp_path, **files)
