"""Fields that requests share: whole numbers, texts and switches with their bounds, and names that are taken where they ask for nothing."""

from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)
from pydantic_core import PydanticCustomError, core_schema

from holdfast.request.sampling_params import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIASES,
    MAX_N,
    MAX_STOP_STRING_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
)
from holdfast.server.bodies import Body

MAX_TEXT_CHARS = 8 * 2**20
"""Of one text; the body as a whole has a bound in bytes."""
MAX_NAME_CHARS = 256
MAX_MESSAGES = 4096
MAX_TOOLS = 128
MAX_PROMPTS = 256
MAX_INT = 2**31 - 1


class Reply(BaseModel):
    """An answer, or a part of one, as the OpenAPI document shows it."""

    model_config = ConfigDict(extra="forbid")


def refuse(words: str) -> PydanticCustomError:
    """An error whose message is these words, whatever braces they hold."""
    return PydanticCustomError("refused", "{words}", {"words": words})


def _whole(value: object) -> object:
    # JSON has one kind of number: 16.0 is 16 wherever it was written by a language without integers.
    return int(value) if isinstance(value, float) and value.is_integer() else value


class TakenOnly:
    """For a field that is known, and taken with null or `taken` alone; another value is refused with these words."""

    def __init__(self, words: str, *taken: object) -> None:
        self._words = words
        self._taken = taken

    def check(self, value: object) -> object:
        """The value, where it asks for nothing."""
        if value is None or any(type(value) is type(quiet) and value == quiet for quiet in self._taken):
            return value
        raise refuse(self._words)

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:  # noqa: ANN401
        return core_schema.no_info_plain_validator_function(self.check)

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {"enum": [None, *self._taken], "description": self._words}


CLOSED: dict[str, Any] = {"additionalProperties": False}
"""Of objects whose names follow a pattern."""
OWN_VARIABLES = frozenset(
    (
        *(
            "messages",
            "conversation",
            "tools",
            "documents",
            "chat_template",
            "add_generation_prompt",
            "control",
            "self",
        ),
        *("continue_final_message", "tools_in_words", "tokenize", "allow_special_tokens"),
    )
)
"""Of templates and of who renders them: chat_template_kwargs cannot set these; nor can they say how a special token is written."""


def _not_own(name: str) -> str:
    if name in OWN_VARIABLES or name.endswith("_token"):
        raise refuse(f"the template's {name} is not for requests to set: leave it out")
    return name


NOT_OWN = AfterValidator(_not_own)
UNUSED = Field(description="Taken; it changes nothing here.")
WHOLE = BeforeValidator(_whole)
"""Behind the bounds of a number, which the document would not show otherwise."""
TokenId = Annotated[int, Field(ge=0, le=MAX_INT), WHOLE]
MAX_PROMPT_TOKENS = 2**21


def _plain_ids(value: object, check: ValidatorFunctionWrapHandler) -> object:
    """Token ids as they are where all are: one by one, a million of them would hold up everybody else for seconds."""
    if type(value) is not list or not 0 < len(value) <= MAX_PROMPT_TOKENS or set(map(type, value)) != {int}:
        return check(value)
    return value if min(value) >= 0 and max(value) <= MAX_INT else check(value)


PLAIN_IDS = WrapValidator(_plain_ids)
TokenIds = Annotated[list[TokenId], Field(max_length=MAX_PROMPT_TOKENS, fail_fast=True), PLAIN_IDS]
TokenPrompt = Annotated[list[TokenId], Field(min_length=1, max_length=MAX_PROMPT_TOKENS, fail_fast=True), PLAIN_IDS]
Positive = Annotated[int, Field(ge=1, le=MAX_INT), WHOLE]
Number = Annotated[float, Field(allow_inf_nan=False)]
Text = Annotated[str, Field(max_length=MAX_TEXT_CHARS)]
Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_STRING_CHARS)]
BiasKey = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
]
JsonSchema = dict[str, Any]
"""A JSON schema as it came; its size and depth are bounded where it is compiled."""

TemplateName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,63}$"), NOT_OWN]
TemplateValue = bool | Annotated[int, Field(ge=-MAX_INT, le=MAX_INT), WHOLE] | Annotated[str, Field(max_length=256)]


class StructuredFields(Body):
    """What an answer is held to, in vLLM's names."""

    json_: Annotated[JsonSchema | Text | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    choice: (
        Annotated[list[Annotated[str, Field(min_length=1, max_length=4096)]], Field(min_length=1, max_length=1024)]
        | None
    ) = None
    grammar: Annotated[str, Field(min_length=1, max_length=2**16)] | None = None


class StreamOptions(Body):
    """How a stream is written."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Annotated[bool | None, UNUSED] = None


class SamplingFields(Body):
    """How tokens are chosen: OpenAI's names, and those that vLLM's users add."""

    model: Annotated[Name | None, Field(description="One of /v1/models; left out, the served one.")] = None
    n: Annotated[int, Field(ge=1, le=MAX_N), WHOLE] | None = None
    temperature: Annotated[Number, Field(ge=0, le=100)] | None = None
    top_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_INT), WHOLE] | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[Number, Field(gt=0, le=100)] | None = None
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    logit_bias: (
        Annotated[
            dict[BiasKey, Annotated[Number, Field(ge=-100, le=100)]],
            Field(max_length=MAX_LOGIT_BIASES, json_schema_extra=CLOSED),
        ]
        | None
    ) = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1), WHOLE] | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    bad_words: Annotated[list[StopString], Field(max_length=MAX_BAD_WORDS)] | None = None
    allowed_token_ids: (
        Annotated[list[TokenId], Field(min_length=1, max_length=MAX_ALLOWED_TOKEN_IDS, fail_fast=True), PLAIN_IDS]
        | None
    ) = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0, le=MAX_INT), WHOLE] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=MAX_INT), WHOLE] | None = None
    cache_salt: Name | None = None
    priority: Annotated[int, Field(ge=-MAX_INT, le=MAX_INT, description="Lower is earlier."), WHOLE] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    structured_outputs: StructuredFields | None = None
    guided_json: JsonSchema | Text | None = None
    guided_regex: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    guided_choice: (
        Annotated[list[Annotated[str, Field(min_length=1, max_length=4096)]], Field(min_length=1, max_length=1024)]
        | None
    ) = None
    guided_grammar: Annotated[str, Field(min_length=1, max_length=2**16)] | None = None
    user: Annotated[Text | None, UNUSED] = None
    spaces_between_special_tokens: Annotated[bool | None, UNUSED] = None
    use_beam_search: Annotated[object, TakenOnly("beam search is not here: use n with temperature above 0", False)] = (
        None
    )
    length_penalty: Annotated[object, TakenOnly("beam search is not here: leave it out", 1, 1.0)] = None
    prompt_logprobs: Annotated[object, TakenOnly("ask /v1/completions with echo and logprobs")] = None
    logits_processors: Annotated[
        object, TakenOnly("code is not taken from requests: use logit_bias, bad_words or allowed_token_ids")
    ] = None
    # vllm-router writes these two into whatever it passes on.
    no_stop_trim: Annotated[object, TakenOnly("use include_stop_str_in_output", False)] = None
    return_hidden_states: Annotated[object, TakenOnly("hidden states are not given out: leave it out", False)] = None
