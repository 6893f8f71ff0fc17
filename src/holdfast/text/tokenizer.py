"""Tokenizer: text to token ids and back, from a folder's tokenizer.json; no torch."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.errors import ModelFormatError, PromptError
from holdfast.loading.sources.json_file import AGAIN, read_small_file
from holdfast.models.settings import plain
from holdfast.text.special_tokens import CONFIG_FILE, SpecialTokens, TokenEntry, special_tokens_of
from holdfast.text.token_pieces import TextStream, TokenPieces, decode_rule
from holdfast.text.token_reach import longest_token_chars

if TYPE_CHECKING:
    import tokenizers

TOKENIZER_FILE = "tokenizer.json"
MAX_TOKENIZER_BYTES = 256 * 2**20
OTHER_FORMS = {
    "tokenizer.model": "a SentencePiece or tiktoken model",
    "spiece.model": "a SentencePiece model",
    "tiktoken.model": "a tiktoken model",
    "tekken.json": "a Mistral tekken vocabulary",
    "vocab.json": "a vocabulary and merges in files of their own",
}
"""What a folder may hold in place of tokenizer.json, in words."""


class Tokenizer:
    """Text to token ids and back. Encoding is the `tokenizers` library's; decoding is byte-exact and streams."""

    def __init__(
        self,
        backend: "tokenizers.Tokenizer",
        origin: str,
        special_tokens: Mapping[str, str],
        end_token_ids: Sequence[int] = (),
        vocab_size: int | None = None,
    ) -> None:
        self.origin = origin
        """The file it came from."""
        self.special_tokens = dict(special_tokens)
        """bos_token, eos_token and the like, as text."""
        self._backend = backend
        with native_calls(origin):
            backend.no_truncation()
            backend.no_padding()
            added = backend.get_added_tokens_decoder()
            decoder_json = backend.decoder.__getstate__() if backend.decoder is not None else None
            if vocab_size is None:
                vocab_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.vocab_size: int = vocab_size
        """Size of the id space that the tokenizer knows; a model may have more rows."""
        self.bos_token_id = self._named_id("bos_token")
        self.eos_token_id = self._named_id("eos_token")
        self.special_token_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        eos = () if self.eos_token_id is None else (self.eos_token_id,)
        self.end_token_ids = frozenset((*eos, *end_token_ids))
        """Tokens that end an answer, as far as the tokenizer's files say."""
        self._pieces = TokenPieces(backend.id_to_token, decode_rule(decoder_json, origin), self.special_token_ids)

    @cached_property
    def longest_token_chars(self) -> int:
        """Most characters of a text that one token stands for, so that a text too long for the context costs nothing.

        Characters that leave no token at all, such as spaces beside a token that strips them, are not counted.
        """
        return longest_token_chars(self._backend)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; special tokens written out in it are understood, as in transformers."""
        if not isinstance(text, str):
            raise PromptError(f"a prompt of type {type(text).__name__} was given", "text is a string", "pass a string")
        if not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise PromptError(
                    f"a prompt with half a surrogate pair at character {error.start} was given",
                    "text is valid Unicode",
                    "remove the character or replace it by U+FFFD",
                ) from error
        try:
            with native_calls(self.origin):
                return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except ModelFormatError as error:
            raise PromptError(
                f"a prompt of {len(text)} characters was given",
                f"the tokenizer of {self.origin} failed on it: {error.has}",
                "change the text",
            ) from error

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids; ids without a token add nothing."""
        stream = self.text_stream(skip_special_tokens)
        return stream.push(token_ids) + stream.finish()

    def token_text(self, token_id: int) -> str:
        """One token as it stands inside a text; bytes that are no whole character show as U+FFFD."""
        return (self._pieces.piece(token_id) or b"").decode(errors="replace")

    def text_stream(self, skip_special_tokens: bool) -> TextStream:
        """A text to be built from token ids as they come."""
        return TextStream(self._pieces, skip_special_tokens)

    def _named_id(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else self._backend.token_to_id(text)


def tokenizer_from_directory(path: Path) -> Tokenizer:
    """The tokenizer of a folder in Hugging Face layout: tokenizer.json, and the special tokens that others name."""
    file = path / TOKENIZER_FILE
    if not file.is_file():
        raise _missing(path)
    import tokenizers

    data = read_small_file(file, MAX_TOKENIZER_BYTES)
    with native_calls(TOKENIZER_FILE):
        backend = tokenizers.Tokenizer.from_buffer(data)
    special = special_tokens_of(path)
    with native_calls(CONFIG_FILE):
        backend.add_tokens([tokenizers.AddedToken(e.content, **e.flags) for e in _tokens_to_add(backend, special)])
        backend.encode_special_tokens = special.are_plain_text
    return Tokenizer(backend, TOKENIZER_FILE, special.texts())


def _tokens_to_add(backend: "tokenizers.Tokenizer", special: SpecialTokens) -> list[TokenEntry]:
    """Tokens listed by id, then named ones and extra ones that are not among them; named ones are special."""
    present = {
        token_id: TokenEntry(token.content, _flags_of(token))
        for token_id, token in sorted(backend.get_added_tokens_decoder().items())
    }
    added = dict(sorted((special.added if special.added is not None else present).items()))
    names = {entry.content for entry in special.named.values()}
    known = {entry.content for entry in (*present.values(), *added.values())}
    found = [entry.as_special() if entry.content in names else entry for entry in added.values()]
    for entry in (*special.named.values(), *special.extra):
        if entry.content not in known:
            known.add(entry.content)
            found.append(entry.as_special())
    return found


def _flags_of(token: "tokenizers.AddedToken") -> dict[str, bool]:
    return {
        "single_word": token.single_word,
        "lstrip": token.lstrip,
        "rstrip": token.rstrip,
        "normalized": token.normalized,
        "special": token.special,
    }


def _missing(path: Path) -> ModelFormatError:
    found = [f"{name} ({words})" for name, words in OTHER_FORMS.items() if (path / name).is_file()]
    found += [f"{file.name} (a tiktoken vocabulary)" for file in sorted(path.glob("*.tiktoken"))[:1]]
    if not found:
        return ModelFormatError(
            f"{path} has no {TOKENIZER_FILE}",
            "there is no tokenizer of another form either",
            f"download {TOKENIZER_FILE} from where the model came from",
        )
    return ModelFormatError(
        f"{path} has no {TOKENIZER_FILE}",
        f"it has {', '.join(found)}",
        "convert it once with transformers: AutoTokenizer.from_pretrained(folder).save_pretrained(folder)",
    )


@contextmanager
def native_calls(origin: str) -> Iterator[None]:
    """Whatever the `tokenizers` library raises, as an error that names the file."""
    try:
        yield
    except Exception as error:
        raise _broken(origin, error) from error
    except BaseException as error:
        # A panic in its Rust code arrives as a BaseException of a class that cannot be imported.
        if type(error).__name__ != "PanicException":
            raise
        raise _broken(origin, error) from None


def _broken(origin: str, error: BaseException) -> ModelFormatError:
    if isinstance(error, ModelFormatError):
        return error
    reason = plain(str(error)) or type(error).__name__
    return ModelFormatError(f"{origin} is no sound tokenizer", reason, AGAIN)
