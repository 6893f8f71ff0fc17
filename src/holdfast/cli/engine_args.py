"""EngineArgs and FlexibleArgumentParser: vLLM's classes for programs with engine options; no torch."""

import argparse
import dataclasses
import sys
import uuid
from collections.abc import Sequence
from typing import Any

from holdfast.cli.options import ENGINE_SETTINGS, flag
from holdfast.config import ALIASES, EngineConfig
from holdfast.request.vllm_flags import read_value
from holdfast.request.vllm_names import ENGINE_NAMES, Foreign

_FIELDS = tuple(field.name for field in dataclasses.fields(EngineConfig))


class EngineArgs(EngineConfig):
    """An EngineConfig with settable fields that also accepts vLLM's names."""

    def __init__(self, model: str | None = None, **options: object) -> None:
        self._take(EngineConfig.from_options(model=model, **options))

    def __setattr__(self, name: str, value: object) -> None:
        """Set a field, checked as in the constructor."""
        own = ALIASES.get(name, name)
        left = {field: given for field, given in vars(self).items() if field != own}
        self._take(EngineConfig.from_options(**left, **{name: value}))

    def __getattr__(self, name: str) -> object:
        if name in ALIASES:
            return getattr(self, ALIASES[name])
        raise AttributeError(f"{type(self).__name__} has no {name}")

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add an option for every field and every vLLM name."""
        group = parser.add_argument_group("Engine")
        defaults = {field.name: field.default for field in dataclasses.fields(EngineConfig)}
        group.add_argument(
            "--model", default=None, help="A folder, a GGUF file or owner/name. Default: the default model."
        )
        for setting in ENGINE_SETTINGS:
            row: dict[str, Any] = {"dest": setting.name, "default": defaults[setting.name], "help": argparse.SUPPRESS}
            if setting.is_switch:
                group.add_argument(flag(setting.name), action=argparse.BooleanOptionalAction, **row)
            elif setting.is_repeated:
                group.add_argument(flag(setting.name), nargs="+", **row)
            else:
                spellings = map(flag, (setting.name, *setting.aliases, *setting.other_names))
                group.add_argument(*spellings, *_SHORT.get(setting.name, ()), type=setting.read, **row)
        for name, foreign in ENGINE_NAMES.items():
            _add_foreign(group, name, foreign)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> "EngineArgs":
        """Make EngineArgs from parsed arguments; ignore other options of the program."""
        names = {*_FIELDS, *ALIASES, *ENGINE_NAMES}
        return cls(**{name: value for name, value in vars(args).items() if name in names})

    def create_engine_config(self, *args: object, **options: object) -> EngineConfig:
        """Return the options as an EngineConfig."""
        return EngineConfig(**vars(self))

    def _take(self, config: EngineConfig) -> None:
        for name in _FIELDS:
            object.__setattr__(self, name, getattr(config, name))


class AsyncEngineArgs(EngineArgs):
    """EngineArgs of an AsyncLLM."""


_SHORT = {"tensor_parallel_size": ("-tp",), "pipeline_parallel_size": ("-pp",)}


def _add_foreign(group: argparse._ArgumentGroup, name: str, foreign: Foreign) -> None:
    row: dict[str, Any] = {"dest": name, "default": None, "help": argparse.SUPPRESS}
    if foreign.is_switch:
        group.add_argument(flag(name), action=argparse.BooleanOptionalAction, **row)
    else:
        group.add_argument(flag(name), type=read_value, **row)


class FlexibleArgumentParser(argparse.ArgumentParser):
    """ArgumentParser that also accepts --max_model_len for --max-model-len."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        given = sys.argv[1:] if args is None else args
        return super().parse_known_args([_dashed(argument) for argument in given], namespace or argparse.Namespace())


def _dashed(argument: str) -> str:
    name, equals, value = argument.partition("=")
    return f"{name.replace('_', '-')}{equals}{value}" if argument.startswith("--") else argument


def random_uuid() -> str:
    """Return a unique request id."""
    return uuid.uuid4().hex
