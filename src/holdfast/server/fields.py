"""Field types that request models share: numbers, texts and token ids with their bounds, and known but refused fields."""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    PlainValidator,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapValidator,
    create_model,
)
from pydantic_core import PydanticCustomError

from holdfast.request import sampling_params as limits
from holdfast.server.bodies import Body
from holdfast.server.tables import data_table

MAX_TEXT_CHARS = 8 * 2**20
"""Limit per text; ServerLimits bounds the whole body in bytes."""
MAX_MESSAGES = 4096
MAX_TOOLS = 128
MAX_PROMPTS = 256
MAX_INT = 2**31 - 1
MAX_PROMPT_TOKENS = 2**21
Model = TypeVar("Model", bound=BaseModel)


def refuse(message: str) -> PydanticCustomError:
    """Make an error with exactly this message, braces included."""
    return PydanticCustomError("refused", "{message}", {"message": message})


def _refused(message: str, *accepted: object) -> object:
    """Return the type of an unimplemented field, which accepts only null and values without effect."""

    def check(value: object) -> object:
        if value is None or any(type(value) is type(same) and value == same for same in accepted):
            return value
        raise refuse(message)

    schema = {"enum": [None, *accepted], "description": message}
    return Annotated[object, PlainValidator(check), WithJsonSchema(schema)]


def with_refused(model: type[Model]) -> type[Model]:
    """Add the refused fields that data/refused_fields.toml lists under the name of a model."""
    fields: dict[str, Any] = {
        name: (_refused(*row), None) for name, row in data_table("refused_fields.toml")[model.__name__].items()
    }
    return create_model(model.__name__, __base__=model, __doc__=model.__doc__, __module__=model.__module__, **fields)


def _whole(value: object) -> object:
    # JSON has one kind of number: 16.0 is 16 if a language without integers wrote it.
    return int(value) if isinstance(value, float) and value.is_integer() else value


CLOSED: dict[str, Any] = {"additionalProperties": False}
"""Schema extra that forbids names outside an object's pattern."""
OWN_VARIABLES = frozenset(
    (
        *("messages", "conversation", "tools", "documents", "chat_template", "add_generation_prompt", "control"),
        *("self", "continue_final_message", "tools_as_text", "tokenize", "allow_special_tokens"),
    )
)
"""Variables of templates and of their renderer: chat_template_kwargs cannot set these, nor names that end in _token."""


def _not_own(name: str) -> str:
    if name in OWN_VARIABLES or name.endswith("_token"):
        raise refuse(f"a request cannot set {name} of the template: leave it out")
    return name


def _plain_ids(value: object, check: ValidatorFunctionWrapHandler) -> object:
    """Validate all token ids in bulk; one by one, a million would block the event loop for seconds."""
    if type(value) is not list or not 0 < len(value) <= MAX_PROMPT_TOKENS or set(map(type, value)) != {int}:
        return check(value)
    return value if min(value) >= 0 and max(value) <= MAX_INT else check(value)


UNUSED = Field(description="Accepted; has no effect.")
WHOLE = BeforeValidator(_whole)
"""Converts 16.0 to 16. Put it after the bounds, or the OpenAPI document omits them."""
PLAIN_IDS = WrapValidator(_plain_ids)
TokenId = Annotated[int, Field(ge=0, le=MAX_INT), WHOLE]
TokenIds = Annotated[list[TokenId], Field(max_length=MAX_PROMPT_TOKENS, fail_fast=True), PLAIN_IDS]
TokenPrompt = Annotated[list[TokenId], Field(min_length=1, max_length=MAX_PROMPT_TOKENS, fail_fast=True), PLAIN_IDS]
AllowedIds = Annotated[
    list[TokenId], Field(min_length=1, max_length=limits.MAX_ALLOWED_TOKEN_IDS, fail_fast=True), PLAIN_IDS
]
Positive = Annotated[int, Field(ge=1, le=MAX_INT), WHOLE]
Natural = Annotated[int, Field(ge=0, le=MAX_INT), WHOLE]
NaturalOrMinusOne = Annotated[int, Field(ge=-1, le=MAX_INT), WHOLE]
NumTop = Annotated[int, Field(ge=0, le=limits.MAX_LOGPROBS), WHOLE]
Seed = Annotated[int, Field(ge=-(2**63), le=2**63 - 1), WHOLE]
Priority = Annotated[int, Field(ge=-MAX_INT, le=MAX_INT, description="Lower runs first."), WHOLE]
Number = Annotated[float, Field(allow_inf_nan=False)]
Temperature = Annotated[Number, Field(ge=0, le=100)]
Share = Annotated[Number, Field(ge=0, le=1)]
Penalty = Annotated[Number, Field(ge=-2, le=2)]
Factor = Annotated[Number, Field(gt=0, le=100)]
Text = Annotated[str, Field(max_length=MAX_TEXT_CHARS)]
Name = Annotated[str, Field(min_length=1, max_length=256)]
Description = Annotated[str, Field(max_length=2**16)]
SchemaName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.:/$@-]{1,128}$")]
StopString = Annotated[str, Field(min_length=1, max_length=limits.MAX_STOP_STRING_CHARS)]
Stops = StopString | Annotated[list[StopString], Field(max_length=limits.MAX_STOP_STRINGS)]
BiasKey = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
Biases = Annotated[
    dict[BiasKey, Annotated[Number, Field(ge=-100, le=100)]],
    Field(max_length=limits.MAX_LOGIT_BIASES, json_schema_extra=CLOSED),
]
Pattern = Annotated[str, Field(min_length=1, max_length=4096)]
Choices = Annotated[list[Pattern], Field(min_length=1, max_length=1024)]
GrammarText = Annotated[str, Field(min_length=1, max_length=2**16)]
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
]
JsonSchema = dict[str, Any]
"""A JSON schema; the grammar compiler bounds its size and depth."""
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
CacheRetention = Annotated[Literal["in_memory", "in-memory", "24h"] | None, UNUSED]
UnusedText = Annotated[Text | None, UNUSED]
UnusedName = Annotated[Name | None, UNUSED]
UnusedObject = Annotated[dict[str, Any] | None, UNUSED]
Unused = Annotated[Any, UNUSED]
ServedModel = Annotated[Name | None, Field(description="One of /v1/models; the first if left out.")]
TemplateName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,63}$"), AfterValidator(_not_own)]
TemplateValue = bool | Annotated[int, Field(ge=-MAX_INT, le=MAX_INT), WHOLE] | Annotated[str, Field(max_length=256)]
TemplateOptions = Annotated[dict[TemplateName, TemplateValue], Field(max_length=16, json_schema_extra=CLOSED)]


class StructuredFields(Body):
    json_: Annotated[JsonSchema | Text | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: Pattern | None = None
    choice: Choices | None = None
    grammar: GrammarText | None = None


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Annotated[bool | None, UNUSED] = None


@with_refused
class SamplingFields(Body):
    """Sampling options: OpenAI's names, and those that vLLM adds."""

    model: ServedModel = None
    n: Annotated[int, Field(ge=1, le=limits.MAX_N), WHOLE] | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: NaturalOrMinusOne | None = None
    min_p: Share | None = None
    repetition_penalty: Factor | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Biases | None = None
    seed: Seed | None = None
    stop: Stops | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=limits.MAX_STOP_TOKEN_IDS)] | None = None
    bad_words: Annotated[list[StopString], Field(max_length=limits.MAX_BAD_WORDS)] | None = None
    allowed_token_ids: AllowedIds | None = None
    ignore_eos: bool | None = None
    min_tokens: Natural | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    truncate_prompt_tokens: NaturalOrMinusOne | None = None
    cache_salt: Name | None = None
    priority: Priority | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    structured_outputs: StructuredFields | None = None
    guided_json: JsonSchema | Text | None = None
    guided_regex: Pattern | None = None
    guided_choice: Choices | None = None
    guided_grammar: GrammarText | None = None
    user: UnusedText = None
    spaces_between_special_tokens: Annotated[bool | None, UNUSED] = None
