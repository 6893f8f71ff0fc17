"""ChatTokenizer: a model's tokenizer and chat template with transformers' method names; no torch."""

from collections.abc import Mapping, Sequence

from holdfast.engine.admission import Conversation
from holdfast.errors import PromptError, TemplateError
from holdfast.text.chat_template import ChatTemplate
from holdfast.text.tokenizer import Tokenizer


def _special_token(name: str) -> property:
    """Make a property that reads a special token, or None."""
    return property(lambda self: self._tokenizer.special_tokens.get(name))


class ChatTokenizer:
    """Encode, decode and apply_chat_template, with the defaults of transformers."""

    def __init__(self, tokenizer: Tokenizer, chat_template: ChatTemplate | None) -> None:
        self._tokenizer = tokenizer
        self._template = chat_template
        self.name_or_path = tokenizer.origin

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return token ids; special tokens in the text are parsed."""
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: Sequence[int] | int, skip_special_tokens: bool = False) -> str:
        """Return the text of token ids."""
        return self._tokenizer.decode(_listed(token_ids), skip_special_tokens)

    def batch_decode(self, sequences: Sequence[Sequence[int]], skip_special_tokens: bool = False) -> list[str]:
        """Decode each sequence."""
        return [self.decode(token_ids, skip_special_tokens) for token_ids in sequences]

    def __call__(self, text: str | Sequence[str], add_special_tokens: bool = True) -> dict[str, object]:
        """Return `input_ids` and `attention_mask` of one text or of several, without padding."""
        if isinstance(text, str):
            ids = self.encode(text, add_special_tokens)
            return {"input_ids": ids, "attention_mask": [1] * len(ids)}
        many = [self.encode(one, add_special_tokens) for one in text]
        return {"input_ids": many, "attention_mask": [[1] * len(ids) for ids in many]}

    def tokenize(self, text: str, add_special_tokens: bool = False) -> list[str]:
        """Return raw vocabulary tokens."""
        return self.convert_ids_to_tokens(self.encode(text, add_special_tokens))

    def convert_ids_to_tokens(self, token_ids: Sequence[int]) -> list[str]:
        """Return raw vocabulary tokens; an id without a token becomes an empty one."""
        return [self._tokenizer.vocabulary_token(token_id) or "" for token_id in token_ids]

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> int | list[int | None] | None:
        """Return the id of one token, or of each; None if there is none."""
        if isinstance(tokens, str):
            return self._tokenizer.vocabulary_id(tokens)
        return [self._tokenizer.vocabulary_id(token) for token in tokens]

    def apply_chat_template(
        self,
        conversation: Conversation | Sequence[Conversation],
        tools: Sequence[object] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        allow_special_tokens: bool = False,
        **template_options: object,
    ) -> object:
        """Render a conversation, or each of several, as text or as token ids.

        If it returns ids, special tokens in messages are plain text unless `allow_special_tokens`.
        """
        if conversation and isinstance(conversation[0], list | tuple):
            options = {"tools": tools, "chat_template": chat_template, "tokenize": tokenize, **template_options}
            flags = {"add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message}
            flags["allow_special_tokens"] = allow_special_tokens
            return [self.apply_chat_template(one, **options, **flags) for one in conversation]  # type: ignore[arg-type]
        rendered = self._chosen(chat_template).render_chat(
            conversation,  # type: ignore[arg-type]
            None if allow_special_tokens or not tokenize else self._tokenizer.control_tokens,
            add_generation_prompt,
            continue_final_message,
            tools=tools,
            **template_options,  # type: ignore[arg-type]
        )
        return self._tokenizer.encode_chat(rendered.text, rendered.own) if tokenize else rendered.text

    @property
    def chat_template(self) -> str | None:
        return None if self._template is None else self._template.source

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.vocab_size

    def __len__(self) -> int:
        return self._tokenizer.vocab_size

    @property
    def special_tokens_map(self) -> Mapping[str, str]:
        return dict(self._tokenizer.special_tokens)

    @property
    def all_special_ids(self) -> list[int]:
        return sorted(self._tokenizer.special_token_ids)

    @property
    def all_special_tokens(self) -> list[str]:
        return self.convert_ids_to_tokens(self.all_special_ids)

    bos_token = _special_token("bos_token")
    eos_token = _special_token("eos_token")
    pad_token = _special_token("pad_token")
    unk_token = _special_token("unk_token")

    @property
    def bos_token_id(self) -> int | None:
        return self._tokenizer.bos_token_id

    @property
    def eos_token_id(self) -> int | None:
        return self._tokenizer.eos_token_id

    @property
    def pad_token_id(self) -> int | None:
        return None if self.pad_token is None else self._tokenizer.vocabulary_id(self.pad_token)

    @property
    def unk_token_id(self) -> int | None:
        return None if self.unk_token is None else self._tokenizer.vocabulary_id(self.unk_token)

    def _chosen(self, source: str | None) -> ChatTemplate:
        if source is not None:
            return ChatTemplate(source, "chat_template", self._tokenizer.special_tokens)
        if self._template is None:
            raise TemplateError("api.no_chat_template")
        return self._template


def _listed(token_ids: object) -> list[int]:
    """Convert a list, tuple, tensor, array or single id to a list of ids."""
    listed = token_ids.tolist() if hasattr(token_ids, "tolist") else token_ids  # type: ignore[attr-defined]
    listed = [listed] if isinstance(listed, int) else listed
    if not isinstance(listed, list | tuple) or not all(isinstance(token_id, int) for token_id in listed):
        raise PromptError("api.not_token_ids", value=token_ids)
    return list(listed)
