"""Fields of a request as SamplingParams: the model's own advice first, then what was asked; and checks that need the model."""

import re

from holdfast.errors import RequestError
from holdfast.request.sampling_params import SamplingParams
from holdfast.server.errors import ApiError, from_exception
from holdfast.server.fields import SamplingFields
from holdfast.server.service import Service

CONTEXT = re.compile(r"the context holds (\d+)")
"""Of admission's words about a prompt that is too long."""
LEADING_NAME = re.compile(r"(?:\d+ )?([a-z_]+)(?![a-z_])")
SMALLEST_TOP_P = 1e-6
"""OpenAI's top_p = 0 keeps the most likely token alone."""
_SAME_NAMES = (
    *(
        "n",
        "temperature",
        "top_k",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "min_tokens",
    ),
    *("stop_token_ids", "bad_words", "allowed_token_ids", "ignore_eos", "skip_special_tokens", "priority"),
    *("include_stop_str_in_output", "truncate_prompt_tokens"),
)
"""Fields that are called the same in SamplingParams."""
MAX_NAMES_TOLD = 8


def check_model(service: Service, model: str | None) -> None:
    """404 for a name that nothing is served under."""
    if model is not None and model not in service.names:
        names = ", ".join(service.names[:MAX_NAMES_TOLD])
        raise ApiError(
            404,
            f"the model {model!r} was asked; {names} is served here; ask for that, or leave model out",
            param="model",
            code="model_not_found",
        )


def sampling_params(
    service: Service, fields: SamplingFields, *, max_tokens: int | None, logprobs: int | None, **more: object
) -> SamplingParams:
    """The params of a request; RequestError where two fields do not go together."""
    if fields.stream_options is not None and not fields.stream:
        raise ApiError(
            400,
            "stream_options were given; the answer is not streamed; set stream, or leave them out",
            param="stream_options",
        )
    given = {name: value for name in _SAME_NAMES if (value := getattr(fields, name)) is not None}
    if fields.top_p is not None:
        given["top_p"] = max(fields.top_p, SMALLEST_TOP_P)
    if fields.seed is not None:
        given["seed"] = fields.seed % 2**64
    if fields.stop is not None:
        given["stop"] = fields.stop
    if fields.logit_bias is not None:
        given["logit_bias"] = {int(token): value for token, value in fields.logit_bias.items()}
    if given.get("priority") == 0:
        del given["priority"]
    advised = service.advised
    given = {**advised, **given, **more, "max_tokens": max_tokens, "logprobs": logprobs}
    return SamplingParams(**given)  # type: ignore[arg-type]


def field_of(error: RequestError) -> str | None:
    """The field that a refusal is about, where its words begin with one: logit_bias holds ..., min_tokens=20 was asked."""
    match = LEADING_NAME.match(error.asked)
    return match[1] if match is not None and match[1] in SamplingFields.model_fields else None


def prompt_error(error: RequestError, param: str) -> ApiError:
    """A fault of a prompt with its field; one that is too long in words that clients look for."""
    told = from_exception(error)
    told.param = told.param or param
    match = CONTEXT.match(error.has)
    if match is not None:
        told.code = "context_length_exceeded"
        told.message = (
            f"{error.asked}; this model's maximum context length is {match[1]} tokens, the answer included; shorten it"
        )
    return told
