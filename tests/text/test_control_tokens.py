"""Control tokens in messages: text whatever the template does with them, and its own stay what they are."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from error_codes import raises_code
from for_each import for_each
from holdfast.errors import PromptError, TemplateError
from holdfast.text.chat_template import ChatTemplate
from holdfast.text.control_tokens import ControlTokens, unmarked
from holdfast.text.detokenizer import byte_alphabet
from holdfast.text.tokenizer import Tokenizer

SPECIAL = ["<|im_start|>", "<|im_end|>", "<s>", "</s>", "<|end|>", "<|end|>x"]
WHOLE = ["<think>", "</think>"]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_level() -> Tokenizer:
    """Bytes with merges of their own, cut by words; a merge crosses from letters into a control token's first sign."""
    alphabet = byte_alphabet()
    merges = [("a", "<"), ("<", "|"), ("e", "n"), ("en", "d"), ("|", ">"), ("a", "b")]
    vocabulary = {**alphabet, **{left + right: 256 + i for i, (left, right) in enumerate(merges)}}
    backend = Backend(models.BPE(vocabulary, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return with_tokens(backend)


def metaspace(scheme: str) -> Tokenizer:
    """SentencePiece-like: a mark for spaces, before the first piece or before all."""
    letters = "▁abcdefghijklmnopqrstuvwxyz<>|/_\nIHu. ,"
    backend = Backend(
        models.BPE({c: i for i, c in enumerate(letters)} | {"▁a": 90, "ab": 91}, [("▁", "a"), ("a", "b")])
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    backend.decoder = decoders.Metaspace(prepend_scheme=scheme)
    return with_tokens(backend)


def llama_like() -> Tokenizer:
    """A normalizer that puts a mark before every piece between control tokens."""
    letters = "▁abcdefghijklmnopqrstuvwxyz<>|/_\nIHu. ,"
    backend = Backend(models.BPE({c: i for i, c in enumerate(letters)} | {"▁a": 90}, [("▁", "a")]))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return with_tokens(backend)


def with_tokens(backend: Backend) -> Tokenizer:
    backend.add_tokens([AddedToken(text, normalized=False) for text in WHOLE])
    backend.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in SPECIAL[:-1]])
    backend.add_special_tokens([AddedToken(SPECIAL[-1], normalized=False, special=True, rstrip=True)])
    return Tokenizer(backend, "fake", {"eos_token": "</s>"})


TOKENIZERS = {
    "byte level": byte_level(),
    "metaspace first": metaspace("first"),
    "metaspace always": metaspace("always"),
    "prepending": llama_like(),
}
TEMPLATE = ChatTemplate(CHATML, "fake", {})
pieces = st.lists(st.sampled_from([*SPECIAL, *WHOLE, "a", "ab", " a ", "<", "|", ">", "end", "\n", "x "]), max_size=9)


@pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
@given(pieces=pieces)
def test_encode_chat_without_own_tokens_encodes_the_whole_text(tokenizer, pieces):
    text = "".join(pieces)
    encoder = tokenizer.content_encoder
    assert encoder.encode(text, [], add_special_tokens=False) == tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
@given(contents=st.lists(pieces.map("".join).filter(lambda text: text.strip()), min_size=1, max_size=3))
def test_render_chat_content_adds_no_control_token(tokenizer, contents):
    messages = [{"role": "user", "content": content} for content in contents]
    rendered = TEMPLATE.render_chat(messages, tokenizer.control_tokens)
    assert rendered.text == TEMPLATE.render(messages)
    ids = tokenizer.encode_chat(rendered.text, rendered.own)
    found = [token_id for token_id in ids if token_id in tokenizer.special_token_ids]
    start, end = (tokenizer.control_tokens.special[text] for text in SPECIAL[:2])
    assert found == [start, end] * len(contents) + [start]
    if tokenizer is TOKENIZERS["byte level"] and SPECIAL[-1] not in rendered.text:
        assert tokenizer.decode(ids, skip_special_tokens=False) == rendered.text


TEMPLATES = {
    "as it is": "<s>{{ messages[0].content }}</s>",
    "trimmed": "<s>{{ messages[0].content | trim }}</s>",
    "upper case": "<s>{{ messages[0].content | upper }}</s>",
    "as JSON": "<s>{{ messages | tojson }}</s>",
    "indented": "<s>{{ messages[0].content | indent }}</s>",
    "joined": "<s>{{ messages | map(attribute='content') | join('<|end|>') }}</s>",
    "split at one": "<s>{{ messages[0].content.split('</s>')[-1] }}</s>",
    "replaced": "<s>{{ messages[0].content.replace('</s>', '') }}</s>",
    "looked for": "<s>{% if '</s>' in messages[0].content %}careful: {% endif %}{{ messages[0].content }}</s>",
    "its end stands before": "<s{{ messages[0].content }}</s>",
    "its end follows": "<s>{{ messages[0].content }}/s></s>",
    "twice": "<s>{{ messages[0].content }}<|end|>{{ messages[0].content }}</s>",
}
CONTENTS = ["</s>", " x</s>y ", "><", ">", "<", "a<s></s></s>b", "<|end|>x", "<|end|></s>"]


@for_each("content", CONTENTS)
@for_each("source", TEMPLATES.values())
def test_templates_that_change_content(source, content):
    tokenizer = TOKENIZERS["byte level"]
    template, messages = ChatTemplate(source, "fake", {}), [{"role": "user", "content": content}]
    rendered = template.render_chat(messages, tokenizer.control_tokens)
    assert rendered.text == template.render(messages)
    ids = tokenizer.encode_chat(rendered.text, rendered.own)
    own = {text: tokenizer.control_tokens.special[text] for text in ("<s>", "</s>", "<|end|>")}
    expected = [own["<s>"]] * source.startswith("<s>") + [own["<|end|>"]] * ("}}<|end|>" in source) + [own["</s>"]]
    assert [token_id for token_id in ids if token_id in tokenizer.special_token_ids] == expected


def test_render_chat_ambiguous_control_tokens_are_refused():
    tokenizer = TOKENIZERS["byte level"]
    measuring = ChatTemplate("<s>{{ messages[0].content | length }} {{ messages[0].content }}", "fake", {})
    with raises_code("template.control_tokens", TemplateError):
        measuring.render_chat([{"role": "user", "content": "x</s>"}], tokenizer.control_tokens)
    assert measuring.render_chat([{"role": "user", "content": "x</s>"}], None).own == ()
    assert measuring.render_chat([{"role": "user", "content": "x >"}], tokenizer.control_tokens).own == ()
    cutting = ChatTemplate("<s>{{ messages[0].content[:5] }}</s>", "fake", {})
    with raises_code("template.control_tokens", TemplateError):
        cutting.render_chat([{"role": "user", "content": "x</s>y"}], tokenizer.control_tokens)


@for_each("place", ["role", "name", "tools", "documents", "key"])
def test_render_chat_control_tokens_in_any_place_stay_text(place):
    tokenizer = TOKENIZERS["byte level"]
    source = "<s>{{ messages | tojson }}{{ tools | tojson }}{{ documents | tojson }}"
    message = {"role": "user", "content": "x"}
    extra = {}
    if place in ("tools", "documents"):
        extra[place] = [{"text": "a</s>b"}]
    else:
        message |= {"</s>": 1} if place == "key" else {place: "a</s>b"}
    rendered = ChatTemplate(source, "fake", {}).render_chat([message], tokenizer.control_tokens, **extra)
    assert [rendered.text[start:end] for start, end in rendered.own] == ["</s>"]


def test_render_chat_non_special_tokens_stay_whole():
    tokenizer = TOKENIZERS["byte level"]
    rendered = ChatTemplate(CHATML, "fake", {}).render_chat(
        [{"role": "user", "content": "<think></s></think>"}], tokenizer.control_tokens
    )
    ids = tokenizer.encode_chat(rendered.text, rendered.own)
    assert [tokenizer.vocabulary_id(text) in ids for text in (*WHOLE, "</s>")] == [True, True, False]


def test_render_chat_reserved_marks_in_text_are_refused():
    tokenizer = TOKENIZERS["byte level"]
    messages = [{"role": "user", "content": "\ufdd0</s>\ufdd2"}]
    with raises_code("template.control_tokens", TemplateError):
        ChatTemplate(CHATML, "fake", {}).render_chat(messages, tokenizer.control_tokens)
    with raises_code("tokenizer.reserved_characters", PromptError):
        tokenizer.encode_chat("\ufdd2</s>", [(1, 5)])


def test_encode_chat_vocabulary_with_token_text_is_refused():
    backend = Backend(models.WordLevel({"</s>": 0, "a": 1, "<unk>": 2}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["</s>"])
    tokenizer = Tokenizer(backend, "fake", {})
    with raises_code("tokenizer.unescapable_token", PromptError):
        tokenizer.encode_chat("a </s> a", [(2, 6)])


def test_control_tokens_empty_leave_messages_unmarked():
    assert ControlTokens({}).marked([{"content": "</s>"}], around=False) == ([{"content": "</s>"}], 0)
    assert unmarked("plain") == ("plain", [])


@pytest.mark.parametrize(
    ("content", "text"),
    [("The sea", "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nThe sea"), (" a ", "assistant\n a ")],
)
def test_render_chat_continues_the_final_message(content, text):
    template = ChatTemplate(CHATML, "fake", {})
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": content}]
    rendered = template.render_chat(messages, None, add_generation_prompt=False, continue_final_message=True)
    assert rendered.text.endswith(text)
    with raises_code("template.two_openings", PromptError):
        template.render_chat(messages, None, continue_final_message=True)
    with raises_code("template.cannot_continue", PromptError):
        template.render_chat(
            [{"role": "assistant", "content": ""}], None, add_generation_prompt=False, continue_final_message=True
        )
