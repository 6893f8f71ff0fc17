"""A GGUF file as a model: spec, parameters, source of weights and advice for generation, from the header alone; no torch."""

from dataclasses import replace
from pathlib import Path

from holdfast.loading.gguf.gguf_config import gguf_config
from holdfast.loading.gguf.gguf_file import GGUFFile, read_gguf
from holdfast.loading.gguf.gguf_source import GGUFSource
from holdfast.loading.planning.open_model import GenerationDefaults, OpenModel
from holdfast.loading.planning.plan import plan_load
from holdfast.models.families import parameters, read_spec
from holdfast.models.spec import ModelSpec
from holdfast.observability.log import get_logger

log = get_logger(__name__)
END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
INTERLEAVED_ARCHITECTURES = ("llama",)
"""Those whose query and key rows the conversion reorders, to rotate neighbours in place of halves."""


def open_gguf(path: Path) -> OpenModel:
    """Read the header and say what is in the file; no weight is read."""
    file = read_gguf(path)
    spec = _read_spec(file)
    is_interleaved = file.metadata["general.architecture"] in INTERLEAVED_ARCHITECTURES
    return OpenModel(
        path=path,
        kind="gguf",
        spec=spec,
        parameters=parameters(spec),
        source=GGUFSource(file, spec.head_dim if is_interleaved else None),
        generation=_generation(file, spec.vocab_size),
        gguf=file,
    )


def refuse_wrong_headers(opened: OpenModel) -> None:
    """What loading the file would say of its tensors: missing, too many, of another shape; the source may be closed already."""
    plan_load(opened.parameters, opened.source, opened.spec.checkpoint_dtype)


def _read_spec(file: GGUFFile) -> ModelSpec:
    """Metadata does not tell of biases: the tensors do."""
    spec = read_spec(gguf_config(file), file.path.name)
    return replace(
        spec,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        o_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_up.bias" in file.tensors,
    )


def _generation(file: GGUFFile, vocab_size: int) -> GenerationDefaults:
    ends = [_token_id(file, key, vocab_size) for key in END_KEYS]
    return GenerationDefaults(
        eos_token_ids=tuple(dict.fromkeys(end for end in ends if end is not None)),
        bos_token_id=_token_id(file, "bos_token_id", vocab_size),
    )


def _token_id(file: GGUFFile, key: str, vocab_size: int) -> int | None:
    value = file.metadata.get(f"tokenizer.ggml.{key}")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < vocab_size:
        log.warning("%s: tokenizer.ggml.%s is not among %d tokens and counts as none", file.path.name, key, vocab_size)
        return None
    return value
