"""transformers in a benchmark: the same weights, dtype and threads, and its eager `generate`."""

import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import torch

from holdfast.cli.bench_cases import Case, Timing, TokenIds
from holdfast.errors import ConfigError, UnsupportedModelError
from holdfast.loading.gguf.config import gguf_config
from holdfast.loading.planning.open_model import OpenModel
from holdfast.loading.sources.source import read_rows

ROWS_AT_ONCE = 4096
PADDING = 0


def check_installed() -> None:
    """Refuse --against transformers before anything loads if it is not installed."""
    if find_spec("transformers") is None:
        raise ConfigError("bench.no_transformers")


class _Clock:
    """A streamer for `generate`: receives the prompts, then one new token per sequence."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.seconds.append(time.perf_counter())

    def end(self) -> None:
        """Do nothing."""


class TransformersContestant:
    """A model of transformers; runs batches of `max_batch`, padded on the left."""

    name = "transformers"

    def __init__(self, model: Any, max_batch: int) -> None:  # noqa: ANN401 - a class made by transformers
        import transformers

        model.eval()
        # A sequence ends only by its token count, as in our engine.
        model.generation_config = transformers.GenerationConfig(
            do_sample=False, eos_token_id=None, pad_token_id=PADDING, use_cache=True
        )
        self._model = model
        self._max_batch = max_batch

    def run(self, case: Case) -> Timing:
        """Run the batches in sequence."""
        start, first_seconds = time.perf_counter(), 0.0
        token_ids: list[TokenIds] = []
        for begin in range(0, len(case.prompts), self._max_batch):
            part = slice(begin, begin + self._max_batch)
            found, clock = self._generate(case.prompts[part], max(case.num_new[part]))
            token_ids += [ids[:num_new] for ids, num_new in zip(found, case.num_new[part], strict=True)]
            first_seconds = clock.seconds[1] - start
        return Timing(tuple(token_ids), first_seconds, time.perf_counter() - start)

    def _generate(self, prompts: Sequence[TokenIds], num_new: int) -> tuple[list[TokenIds], _Clock]:
        longest, device = max(map(len, prompts)), self._model.device
        ids_BT = torch.full((len(prompts), longest), PADDING, dtype=torch.int64)
        mask_BT = torch.zeros((len(prompts), longest), dtype=torch.int64)
        for row, prompt in enumerate(prompts):
            ids_BT[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask_BT[row, longest - len(prompt) :] = 1
        clock = _Clock()
        with torch.inference_mode():
            out_BT = self._model.generate(
                ids_BT.to(device), attention_mask=mask_BT.to(device), max_new_tokens=num_new, streamer=clock
            )
        return [tuple(row[longest:]) for row in out_BT.tolist()], clock


def open_transformers(opened: OpenModel, dtype: str, device: str) -> Any:  # noqa: ANN401 - a class made by transformers
    """Open the model in transformers: a folder by its loader, a GGUF file from our tensors."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch_dtype = getattr(torch, dtype)
    if opened.gguf is None:
        loader: Any = transformers.AutoModelForCausalLM
        model = loader.from_pretrained(str(opened.path), dtype=torch_dtype, local_files_only=True)
    else:
        kind = getattr(transformers, opened.spec.architecture)
        model = kind(kind.config_class(**_settings(opened))).to(torch_dtype)
        copy_weights(opened, model.state_dict())
    return model.to(device)


def _settings(opened: OpenModel) -> dict[str, Any]:
    """Make a config.json for transformers, with RoPE settings in one field."""
    assert opened.gguf is not None, f"{opened.path} is no GGUF file"
    settings: dict[str, Any] = dict(gguf_config(opened.gguf))
    scaling = settings.pop("rope_scaling")
    settings["rope_parameters"] = {"rope_type": "default", "rope_theta": settings.pop("rope_theta")} | scaling
    if opened.spec.family == "llama":
        settings |= {"attention_bias": opened.spec.qkv_bias, "mlp_bias": opened.spec.mlp_bias}
    return settings


def copy_weights(opened: OpenModel, state: Mapping[str, torch.Tensor]) -> None:
    """Copy every tensor of the file by name; both sides must have the same names."""
    source = opened.source
    tied = {"lm_head.weight"} if opened.spec.tied_embeddings else set()
    missing = sorted(set(state) - set(source.entries) - tied)
    extra = sorted(set(source.entries) - set(state) - source.ignorable)
    if missing or extra:
        names = (missing or extra)[:3]
        raise UnsupportedModelError("bench.other_tensors", architecture=opened.spec.architecture, names=names)
    for name, entry in source.entries.items():
        if name not in state:
            continue
        for begin in range(0, entry.shape[0], ROWS_AT_ONCE):
            end = min(begin + ROWS_AT_ONCE, entry.shape[0])
            state[name][begin:end].copy_(read_rows(source, name, begin, end))
