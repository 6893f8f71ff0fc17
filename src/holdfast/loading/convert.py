"""Quantizes a model into a GGUF file or a compressed-tensors folder: the plan from headers, then the writing; no torch until then.

Rows are rounded to nearest, a step at a time; nothing is calibrated. The output is written beside its place and renamed.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from holdfast.errors import ConfigError, UnsupportedModelError
from holdfast.loading.gguf.source import NATIVE_DTYPES, GGUFSource, hugging_face_name, layer_modules
from holdfast.loading.model_files import open_directory, open_gguf
from holdfast.loading.packed.source import PackedSource
from holdfast.loading.planning.dequantized_source import dequantize_plain_kinds
from holdfast.loading.planning.moves import choose_all
from holdfast.loading.planning.open_model import OpenModel
from holdfast.loading.planning.plan import plan_load
from holdfast.loading.quantized.source import QuantizedSource
from holdfast.loading.quantized.writer import copy_settings, header_of, new_partial, sweep, sync_folder, whole_folder
from holdfast.loading.sources.files import CONFIG_FILE, QUANTIZATION_KEY, read_json_object
from holdfast.loading.sources.safetensors import INDEX_FILE, SINGLE_FILE, file_inside
from holdfast.loading.sources.source import WeightSource
from holdfast.loading.writing.folder_config import folder_config
from holdfast.loading.writing.folder_plan import FORMATS, plan_folder, quantization_config
from holdfast.loading.writing.gguf_header import GGUFValue, PlacedTensor, encode_value, header_bytes, stored_metadata
from holdfast.loading.writing.gguf_plan import (
    MIXES,
    TYPE_NUMBERS,
    architecture_of,
    kept_names,
    plan_checkpoint,
    plan_file,
)
from holdfast.loading.writing.written import WritePlan
from holdfast.memory.sizes import format_bytes
from holdfast.memory.workspace_plan import TensorSpec
from holdfast.models.grouped_readers import FAMILIES, read_spec
from holdfast.models.parameters import Kind

if TYPE_CHECKING:
    from holdfast.loading.writing.write import Progress

TARGETS = (*MIXES, *FORMATS)
"""Values of --to: types of GGUF files, then formats of compressed-tensors."""
EXPANDED_KINDS: tuple[Kind, ...] = ("linear", "expert", "head", "absorbed")
SCALE_DTYPES = ("float16", "bfloat16", "float32")
MAX_FILE_BYTES = 4 * 2**30
"""Most bytes of one file of a folder; a larger tensor gets its own."""
ALIGNMENT = 32


class TokenizerForms(NamedTuple):
    """Makes the model's tokenizer in the form of the other kind of output; raises for one that cannot be written."""

    metadata: Callable[[], Mapping[str, GGUFValue]]
    """Keys of a GGUF file, from a folder."""
    files: Callable[[], Mapping[str, str]]
    """Files of a folder by name, from a GGUF file."""


@dataclass(frozen=True)
class Conversion:
    """A planned output. Nothing has been written, and no weight has been read."""

    model: OpenModel
    source: WeightSource
    plan: WritePlan
    headers: tuple[bytes, ...]
    """The bytes before the data of each file, in order."""
    offsets: Mapping[str, tuple[int, int]]
    """File and byte of every plane."""
    file_bytes: tuple[int, ...]
    config: Mapping[str, object] | None = None
    """config.json of a folder; None for a GGUF file."""
    files: Mapping[str, str] | None = None
    """Texts of other files of the folder, by name; None: those of the model's own folder."""

    @property
    def num_bytes(self) -> int:
        return sum(self.file_bytes)


def plan_conversion(model: OpenModel, target: str, tokenizer: TokenizerForms) -> Conversion:
    """Plan a conversion from headers; refuse what cannot be read, written or kept."""
    if isinstance(model.source, QuantizedSource):
        raise UnsupportedModelError("quantize.stored", model=model.name, stored="weights saved by Holdfast")
    if target in FORMATS:
        return _plan_folder(model, target, tokenizer)
    return _plan_from_gguf(model, target) if model.gguf is not None else _plan_gguf(model, target, tokenizer)


def _expanded(model: OpenModel) -> tuple[WeightSource, dict[str, str]]:
    """Return the source of a folder with all weights as numbers, and the stored types of those that are expanded."""
    source, entries = model.source, model.source.entries
    if isinstance(source, PackedSource):
        others = source.ignorable | source.plain_entries.keys()
        packed = {name: source.settings.titles for name in entries if name not in others}
        plan_load(model.parameters, source, model.spec.checkpoint_dtype)
        return source, packed
    schemes = [] if model.stored is None else [model.stored.scheme, model.stored.of("expert").scheme]
    for scheme in schemes:
        if scheme.codes_per_byte > 1:
            raise UnsupportedModelError("quantize.stored", model=model.name, stored=scheme.name)
    source = dequantize_plain_kinds(source, model.parameters, model.stored, EXPANDED_KINDS)
    plan_load(model.parameters, source, model.spec.checkpoint_dtype)
    changed = {name: entry.dtype for name, entry in entries.items() if source.entries[name].dtype != entry.dtype}
    return source, changed


def _plan_from_gguf(model: OpenModel, target: str) -> Conversion:
    """Plan a file from a file: the same tensors in the same order, metadata unchanged."""
    from holdfast.loading.writing.gguf_metadata import type_metadata

    file = model.gguf
    assert file is not None, f"{model.name} is no GGUF file"
    plan_load(model.parameters, model.source, model.spec.checkpoint_dtype)
    model.source.close()
    source = GGUFSource(file, None, FAMILIES[model.spec.architecture].names)  # rows stay in the order of the file
    plan = plan_file(file, source.entries, _renamed(model), target)
    metadata = stored_metadata(file.path)
    metadata |= {key: encode_value(value) for key, value in type_metadata(target).items()}
    return _gguf_conversion(model, source, plan, metadata)


def _renamed(model: OpenModel) -> dict[str, str]:
    """Return the name of a checkpoint for each tensor of a file, without factors that the values include."""
    assert model.gguf is not None, f"{model.name} is no GGUF file"
    modules = layer_modules(FAMILIES[model.spec.architecture].names)
    return {name: hugging_face_name(name, modules) for name in kept_names(model.gguf, model.gguf.tensors)}


def _plan_gguf(model: OpenModel, target: str, tokenizer: TokenizerForms) -> Conversion:
    """Plan a file from a folder."""
    spec = model.spec
    architecture_of(spec)
    from holdfast.loading.writing.gguf_metadata import rope_factors, spec_metadata, type_metadata

    source, stored_types = _expanded(model)
    fills = choose_all(model.parameters, source.entries).fills
    names = FAMILIES[spec.architecture].names
    plan = plan_checkpoint(fills, source.entries, stored_types, spec, names, rope_factors(spec), target)
    values = {**spec_metadata(spec, model.name), **type_metadata(target), **tokenizer.metadata()}
    return _gguf_conversion(model, source, plan, {key: encode_value(value) for key, value in values.items()})


def _gguf_conversion(
    model: OpenModel, source: WeightSource, plan: WritePlan, metadata: Mapping[str, bytes]
) -> Conversion:
    placed: list[PlacedTensor] = []
    end = 0
    for tensor in plan.tensors:
        (plane,) = tensor.planes
        start = -(-end // ALIGNMENT) * ALIGNMENT
        placed.append(PlacedTensor(plane.name, plane.shape, TYPE_NUMBERS[plane.dtype], start))
        end = start + plane.num_bytes
    header = header_bytes(metadata, placed)
    offsets = {tensor.name: (0, len(header) + tensor.offset) for tensor in placed}
    size = len(header) + -(-end // ALIGNMENT) * ALIGNMENT
    return Conversion(model, source, plan, (header,), offsets, (size,))


def _plan_folder(model: OpenModel, target: str, tokenizer: TokenizerForms) -> Conversion:
    """Plan a folder from a folder or a file."""
    name, spec, file = model.name, model.spec, model.gguf
    if FAMILIES[spec.architecture].text_key:
        raise UnsupportedModelError(
            "quantize.only_text", model=name, architecture=spec.architecture, accepted=tuple(MIXES)
        )
    if file is not None and spec.state is not None:
        raise UnsupportedModelError("quantize.only_file", model=name, accepted=tuple(MIXES))
    source, stored_types = _expanded(model)
    if file is None:
        config, files = {**read_json_object(file_inside(model.path, CONFIG_FILE))}, None
    else:
        config, files = folder_config(file, spec, model.generation), tokenizer.files()
        types = {theirs: file.tensors[name].type.name for name, theirs in _renamed(model).items()}
        stored_types = {name: kind for name, kind in types.items() if kind not in NATIVE_DTYPES}
    dtype = spec.checkpoint_dtype if spec.checkpoint_dtype in SCALE_DTYPES else "bfloat16"
    fills = choose_all(model.parameters, source.entries).fills
    norm_added = spec.norm_offset - read_spec({**config, QUANTIZATION_KEY: None}).norm_offset
    plan = plan_folder(fills, model.parameters, source.entries, stored_types, dtype, norm_added, target)
    if not any(tensor.encoding == target for tensor in plan.tensors):
        reasons = sorted({tensor.reason for tensor in plan.tensors if tensor.num_columns > 1})
        raise UnsupportedModelError(
            "quantize.nothing", model=name, target=target, reason=", ".join(reasons), accepted=tuple(MIXES)
        )
    config[QUANTIZATION_KEY] = quantization_config(plan)
    headers: list[bytes] = []
    offsets: dict[str, tuple[int, int]] = {}
    sizes: list[int] = []
    for number, specs in enumerate(_files(plan)):
        header = header_of(specs, {"format": "pt"})
        end = len(header)
        for one in specs:
            offsets[one.name] = number, end
            end += one.num_bytes
        headers.append(header)
        sizes.append(end)
    return Conversion(model, source, plan, tuple(headers), offsets, tuple(sizes), config, files)


def _files(plan: WritePlan) -> Iterator[list[TensorSpec]]:
    """Yield the tensors of each file. Those of wide types come first, so that each begins at a multiple of its size."""
    held: list[TensorSpec] = []
    for tensor in plan.tensors:
        specs = [TensorSpec(plane.name, plane.shape, plane.dtype) for plane in tensor.planes]
        if held and sum(spec.num_bytes for spec in (*held, *specs)) > MAX_FILE_BYTES:
            yield _by_width(held)
            held = []
        held += specs
    yield _by_width(held)


def _by_width(specs: Sequence[TensorSpec]) -> list[TensorSpec]:
    from holdfast.quant.formats import DTYPE_BYTES

    return sorted(specs, key=lambda spec: -DTYPE_BYTES[spec.dtype])


def refuse_output(out: Path, model: Path | None = None) -> None:
    """Refuse an output that exists, whose folder does not, or that lies in the folder of its model."""
    try:
        if os.path.lexists(out):
            raise ConfigError("quantize.exists", out=out)
        if not out.absolute().parent.is_dir():
            raise ConfigError("quantize.no_parent", out=out)
        if model is not None and model.is_dir() and out.resolve().is_relative_to(model.resolve()):
            raise ConfigError("quantize.inside", out=out, model=model)
    except OSError as error:
        raise ConfigError("quantize.not_written", out=out, reason=error.strerror or error) from error


def write_conversion(conversion: Conversion, out: Path, on_progress: Progress) -> None:
    """Write the output beside `out` and rename it; on any error, remove what was written."""
    refuse_output(out)
    final = out.absolute()
    try:
        free = shutil.disk_usage(final.parent).free
        if free < conversion.num_bytes:
            needed = format_bytes(conversion.num_bytes)
            raise ConfigError("quantize.no_space", out=out, needed=needed, free=format_bytes(free))
        sweep(final.parent, final.name)
        if conversion.config is None:
            with _whole_file(final) as path:
                _write_files(conversion, [path], on_progress)
            return
        with whole_folder(final) as folder:
            if conversion.files is None:
                copy_settings(conversion.model.path, folder)
            else:
                for name, text in conversion.files.items():
                    (folder / name).write_text(text, encoding="utf-8")
            _write_json(folder / CONFIG_FILE, conversion.config)
            count = len(conversion.headers)
            names = [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
            names = names if count > 1 else [SINGLE_FILE]
            if count > 1:
                _write_json(folder / INDEX_FILE, _index(conversion, names))
            _write_files(conversion, [folder / name for name in names], on_progress)
    except FileExistsError as error:
        raise ConfigError("quantize.exists", out=out) from error
    except OSError as error:
        raise ConfigError("quantize.not_written", out=out, reason=error.strerror or error) from error
    finally:
        conversion.source.close()


def _write_files(conversion: Conversion, paths: Sequence[Path], on_progress: Progress) -> None:
    from holdfast.loading.writing.rows import RowReader
    from holdfast.loading.writing.write import Place, PlanWriter, opened_for_writing

    reader = RowReader(conversion.source, conversion.model.gguf)
    with ExitStack() as files:
        descriptors = [
            files.enter_context(opened_for_writing(path, header, num_bytes))
            for path, header, num_bytes in zip(paths, conversion.headers, conversion.file_bytes, strict=True)
        ]
        places = {name: Place(descriptors[file], offset) for name, (file, offset) in conversion.offsets.items()}
        files.callback(reader.close)
        writer = PlanWriter(conversion.plan, reader, places, on_progress)
        writer.write_constants()
        _check_header(conversion, paths[0])
        writer.write_rows()


def _check_header(conversion: Conversion, path: Path) -> None:
    """Open the output by its headers, before a weight is written, and compare its settings with those of the source."""
    from holdfast.loading.writing.gguf_metadata import unwritten

    model = conversion.model
    written = open_gguf(path) if conversion.config is None else open_directory(path.parent)
    written.source.close()
    plan_load(written.parameters, written.source, written.spec.checkpoint_dtype)
    lost = unwritten(written.spec, model.spec)
    if lost is not None:
        arch, kind = model.spec.architecture, "GGUF file" if conversion.config is None else "folder"
        raise UnsupportedModelError("quantize.setting", model=model.name, kind=kind, architecture=arch, setting=lost)


def _index(conversion: Conversion, names: Sequence[str]) -> dict[str, object]:
    weight_map = {plane: names[file] for plane, (file, _) in conversion.offsets.items()}
    return {"metadata": {"total_size": conversion.plan.num_bytes}, "weight_map": weight_map}


def _write_json(path: Path, value: Mapping[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


@contextmanager
def _whole_file(final: Path) -> Iterator[Path]:
    """Yield a path in a temporary folder; at the end of the block, the file becomes `final`, which must not exist."""
    folder, descriptor = new_partial(final)
    try:
        path = folder / final.name
        yield path
        try:
            os.link(path, final)  # fails if the name is taken, as a rename does not
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
            if os.path.lexists(final):
                raise FileExistsError(errno.EEXIST, "another process was faster", str(final)) from error
            os.rename(path, final)
        sync_folder(final.parent)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if descriptor is not None:
            os.close(descriptor)
