"""Windows of a text: whole, one behind the other, with what the tokenizer puts first; and texts that are too short."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing

from engine.fakes import BOS, EOS, VOCAB_SIZE, byte_tokenizer, shared_tokenizer
from error_codes import raises_code
from holdfast.errors import PromptError
from holdfast.eval.text_windows import beginning, cut_windows
from holdfast.text.tokenizer import Tokenizer


def processed(template: str) -> Tokenizer:
    """A tokenizer of bytes that adds its own tokens."""
    tokenizer = byte_tokenizer()
    tokenizer._backend.post_processor = TemplateProcessing(
        single=template, special_tokens=[("<bos>", BOS), ("<eos>", EOS)]
    )
    return tokenizer


@given(st.text(max_size=200), st.integers(2, 40), st.integers(0, 300))
def test_cut_windows_keep_text_order_and_drop_only_end(text: str, window: int, max_tokens: int) -> None:
    ids = list(text.encode())
    tokenizer = shared_tokenizer()
    bound = max_tokens or None
    if len(ids) < window:
        with raises_code("eval.short_text", PromptError, num_tokens=len(ids)):
            cut_windows(tokenizer, text, window, bound, VOCAB_SIZE)
        return
    windows = cut_windows(tokenizer, text, window, bound, VOCAB_SIZE)
    assert {len(own) for own in windows} == {window}
    flat = [token for own in windows for token in own]
    assert [tokenizer.token_text(token) for token in flat] == [
        tokenizer.token_text(token) for token in tokenizer.encode(text)[: len(flat)]
    ]
    assert len(windows) == min(len(ids) // window, max(1, max_tokens // window) if bound else 10**9)


def test_cut_windows_begin_with_tokenizer_prefix() -> None:
    tokenizer = processed("<bos> $A")
    assert beginning(tokenizer) == [BOS]
    windows = cut_windows(tokenizer, "abcdefghi", 4, None, VOCAB_SIZE)
    assert [len(own) for own in windows] == [4, 4, 4]
    assert [own[0] for own in windows] == [BOS, BOS, BOS]
    assert [tokenizer.decode(own) for own in windows] == ["abc", "def", "ghi"]
    assert len(cut_windows(tokenizer, "abcdefghi", 4, 11, VOCAB_SIZE)) == 2


@pytest.mark.parametrize(
    ("template", "prefix"), [("$A", []), ("$A <eos>", []), ("<bos> <eos> $A <eos>", [BOS, EOS])], ids=str
)
def test_cut_windows_exclude_tokenizer_suffix(template: str, prefix: list[int]) -> None:
    tokenizer = processed(template)
    assert beginning(tokenizer) == prefix
    windows = cut_windows(tokenizer, "abcdefgh", 5, None, VOCAB_SIZE)
    assert all(EOS not in own[len(prefix) :] for own in windows)


def test_cut_windows_without_room_for_text_are_refused() -> None:
    with raises_code("eval.short_window", PromptError, window=2, minimum=3):
        cut_windows(processed("<bos> <eos> $A"), "abcdefgh", 2, None, VOCAB_SIZE)


@pytest.mark.parametrize(("text", "hints"), [("", ()), ("abc", ("Windows of 3 tokens fit.",))])
def test_short_text_is_refused_with_a_size_that_fits(text: str, hints: tuple[str, ...]) -> None:
    with raises_code("eval.short_text", PromptError, window=1024, num_tokens=len(text)) as caught:
        cut_windows(shared_tokenizer(), text, 1024, None, VOCAB_SIZE)
    assert caught.value.hints == hints


def test_cut_windows_refuse_foreign_tokenizer() -> None:
    with raises_code("eval.wrong_tokenizer", PromptError, vocab_size=50):
        cut_windows(shared_tokenizer(), "zzzz", 2, None, 50)


def test_text_beyond_the_last_window_is_not_tokenized() -> None:
    lengths = []

    class Counting(Tokenizer):
        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            lengths.append(len(text))
            return super().encode(text, add_special_tokens)

    windows = cut_windows(byte_tokenizer(Counting), "a" * 1_000_000, 16, 64, VOCAB_SIZE)
    assert len(windows) == 4
    assert max(lengths) < 10_000
