import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers

from holdfast.text.tokenizer import NO_BOUND, longest_token_chars
from text.nasty_texts import NASTY_TEXTS
from text.tokenizer_folders import FORMS

BOUNDED = ["byte_level", "byte_level_nfc", "byte_fallback", "byte_fallback_metaspace"]
TOKENIZERS = {form: FORMS[form]() for form in FORMS}


@pytest.mark.parametrize("form", BOUNDED)
def test_no_text_has_more_characters_than_its_tokens_can_stand_for(form):
    tokenizer = TOKENIZERS[form]
    longest = longest_token_chars(tokenizer)
    assert longest < 100
    for text in NASTY_TEXTS.values():
        assert len(text) <= longest * len(tokenizer.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("form", BOUNDED)
@given(text=st.text(max_size=60))
def test_no_random_text_has_either(form, text):
    tokenizer = TOKENIZERS[form]
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert len(text) <= longest_token_chars(tokenizer) * len(ids)


def test_composed_characters_count_for_all_that_they_are_composed_of():
    assert longest_token_chars(TOKENIZERS["byte_level_nfc"]) == 4 * longest_token_chars(TOKENIZERS["byte_level"])


@pytest.mark.parametrize("form", ["unigram", "word_level"])
def test_unknown_words_of_any_length_have_no_bound(form):
    assert longest_token_chars(TOKENIZERS[form]) == NO_BOUND


def test_unknown_characters_without_byte_tokens_have_no_bound():
    model = models.BPE(vocab={"<unk>": 0, "a": 1}, merges=[], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    assert longest_token_chars(Tokenizer(model)) == NO_BOUND


@pytest.mark.parametrize(
    ("normalizer", "is_bounded"),
    [
        (normalizers.NFKC(), True),
        (normalizers.Lowercase(), True),
        (normalizers.Sequence([normalizers.NFC(), normalizers.Replace(" ", "▁")]), True),
        (normalizers.Replace("  ", " "), False),
        (normalizers.Strip(), False),
        (normalizers.StripAccents(), False),
        (normalizers.Sequence([normalizers.NFC(), normalizers.Strip()]), False),
    ],
    ids=lambda value: str(value)[:40],
)
def test_normalizers_that_take_text_away_have_no_bound(normalizer, is_bounded):
    tokenizer = FORMS["byte_level"]()
    tokenizer.normalizer = normalizer
    assert (longest_token_chars(tokenizer) < NO_BOUND) == is_bounded
