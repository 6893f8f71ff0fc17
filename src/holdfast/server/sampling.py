"""Fields of a request as SamplingParams, the constraint on its answer, and errors that name the field."""

from dataclasses import dataclass
from typing import Any

from holdfast.errors import RequestError
from holdfast.request.sampling_params import SamplingParams
from holdfast.request.structured import StructuredOutputs
from holdfast.server.errors import ApiError, from_exception
from holdfast.server.fields import SamplingFields
from holdfast.server.schemas import JsonObjectFormat, JsonSchemaFormat, ResponseFormat
from holdfast.server.service import Service

SMALLEST_TOP_P = 1e-6
"""Replaces OpenAI's top_p = 0, which keeps only the most likely token."""
_SAME_NAMES = (
    *("n", "temperature", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("min_tokens", "stop", "stop_token_ids", "bad_words", "allowed_token_ids", "ignore_eos", "skip_special_tokens"),
    *("priority", "include_stop_str_in_output", "truncate_prompt_tokens"),
)
"""Fields that SamplingParams has under the same name."""
_GUIDED = ("json", "regex", "choice", "grammar")
"""Suffixes of vLLM's older fields, such as guided_json."""
MAX_NAMES_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Rule:
    """A grammar for an answer, and the request field that it came from."""

    param: str
    value: dict[str, Any]
    """One field of StructuredOutputs, with its value."""

    def made(self) -> StructuredOutputs:
        """Convert the rule to StructuredOutputs."""
        try:
            return StructuredOutputs(**self.value)
        except RequestError as error:
            raise self.refused(error) from error

    def refused(self, error: RequestError) -> ApiError:
        """Rename the field in an error to the request's own."""
        refusal = from_exception(error)
        refusal.param = self.param
        return refusal.reword(str(refusal).replace(f"structured_outputs.{next(iter(self.value))}", self.param, 1))


def rule_of(fields: SamplingFields, response_format: ResponseFormat | None) -> Rule | None:
    """Return the grammar of a request; at most one is allowed."""
    rules: dict[str, dict[str, Any]] = {}
    if isinstance(response_format, JsonSchemaFormat) and response_format.json_schema.schema_ is not None:
        rules["response_format"] = {"json": response_format.json_schema.schema_}
    elif isinstance(response_format, JsonObjectFormat | JsonSchemaFormat):
        rules["response_format"] = {"json_object": True}
    if fields.structured_outputs is not None:
        given = fields.structured_outputs.model_dump(exclude_none=True, by_alias=True)
        given = {name: value for name, value in given.items() if value is not False}
        if given:
            rules["structured_outputs"] = given
    for name in _GUIDED:
        value = getattr(fields, f"guided_{name}")
        if value is not None:
            rules[f"guided_{name}"] = {name: value}
    if not rules:
        return None
    name, rule = next(iter(rules.items()))
    if len(rules) > 1 or len(rule) > 1:
        raise ApiError("http.one_rule", param=name, names=" and ".join(rules if len(rules) > 1 else rule))
    return Rule(name, rule)


def check_model(service: Service, model: str | None) -> None:
    """Raise 404 for a name that this server does not serve."""
    if model is not None and model not in service.names:
        raise ApiError("http.model_not_found", param="model", value=model, accepted=service.names[:MAX_NAMES_SHOWN])


def sampling_params(
    service: Service, fields: SamplingFields, *, max_tokens: int | None, logprobs: int | None, **more: object
) -> SamplingParams:
    """Fill a request's SamplingParams with the model's defaults; raise RequestError if two fields conflict."""
    if fields.stream_options is not None and not fields.stream:
        raise ApiError("http.stream_options", param="stream_options")
    given = {name: value for name in _SAME_NAMES if (value := getattr(fields, name)) is not None}
    if fields.top_p is not None:
        given["top_p"] = max(fields.top_p, SMALLEST_TOP_P)
    if fields.seed is not None:
        given["seed"] = fields.seed % 2**64
    if fields.logit_bias is not None:
        given["logit_bias"] = {int(token): value for token, value in fields.logit_bias.items()}
    if given.get("priority") == 0:
        del given["priority"]
    given = {**service.advised, **given, **more, "max_tokens": max_tokens, "logprobs": logprobs}
    return SamplingParams(**given)  # type: ignore[arg-type]


def field_of(error: RequestError) -> str | None:
    """Return the sampling field that an error names."""
    name = error.values.get("name")
    return name if isinstance(name, str) and name in SamplingFields.model_fields else None


def prompt_error(error: RequestError, param: str) -> ApiError:
    """Convert an error of a prompt. If the prompt is too long, add the phrase that clients search for."""
    found = from_exception(error, param)
    if found.public_code == "context_length_exceeded":
        found.hinting(f"This model's maximum context length is {error.values['maximum']} tokens, the answer included.")
    return found
