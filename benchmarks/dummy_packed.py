"""Files of packed dummy weights in the types that `holdfast quantize` chooses: a quantized sample of normal numbers, repeated.

Nothing is quantized beyond the sample, so a file of 20 GB takes as long as writing it, and no file has to be brought along.
"""

import os
import shutil
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import torch
from dummy_models import write_dummy_model

from holdfast.kernels.load.quantize_blocks import quantize_blocks
from holdfast.loading.convert import Conversion, TokenizerForms, plan_conversion
from holdfast.loading.model_files import open_model
from holdfast.loading.writing.codes import pack_int4, pack_nvfp4, second_scale
from holdfast.loading.writing.write import opened_for_writing
from holdfast.loading.writing.written import Written

SAMPLE_ROWS = 64
SPREAD = 0.02
"""Standard deviation of weights."""
PLAIN = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
WRITE_BYTES = 64 * 2**20


def write_packed_model(folder: Path, name: str, target: str, **settings: object) -> Path:
    """Write a GGUF file ("q4_k", "q4_0", "q8_0") or a folder ("int4", "nvfp4") of a catalogue model; return its path."""
    source = write_dummy_model(folder / "source", name, **settings)
    conversion = plan_conversion(open_model(str(source), "dummy"), target, TokenizerForms(dict, dict))
    if conversion.config is None:
        out = folder / f"{name}-{target}.gguf"
        _write(conversion, [out])
        return out
    from json import dumps

    out = folder / f"{name}-{target}"
    shutil.copytree(source, out)
    (out / "config.json").write_text(dumps(conversion.config))
    count = len(conversion.headers)
    names = [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
    names = names if count > 1 else ["model.safetensors"]
    if count > 1:
        weight_map = {plane: names[file] for plane, (file, _) in conversion.offsets.items()}
        (out / "model.safetensors.index.json").write_text(dumps({"metadata": {}, "weight_map": weight_map}))
    _write(conversion, [out / one for one in names])
    return out


def _write(conversion: Conversion, paths: list[Path]) -> None:
    samples: dict[tuple[str, str, int, bool], tuple[bytes, ...]] = {}
    with ExitStack() as files:
        descriptors = [
            files.enter_context(opened_for_writing(path, header, size))
            for path, header, size in zip(paths, conversion.headers, conversion.file_bytes, strict=True)
        ]
        for written in conversion.plan.tensors:
            is_vector = written.num_rows <= 1 or len(written.planes[0].shape) == 1
            key = written.encoding, written.planes[0].dtype, written.num_columns, is_vector
            if not written.parts:
                found: tuple[bytes, ...] = (bytes(written.constant),)
            else:
                if key not in samples:
                    samples[key] = _sample(written, is_vector)
                found = (*samples[key], *_lone(written))
            for plane, data in zip(written.planes, found, strict=True):
                file, offset = conversion.offsets[plane.name]
                _repeat(descriptors[file], offset, plane.num_bytes, data)
    conversion.source.close()


def _sample(written: Written, is_vector: bool) -> tuple[bytes, ...]:
    """Return the bytes of some rows, for each plane with rows; weights of norms are around one."""
    made = torch.Generator().manual_seed(len(written.name))
    shape = (1 if is_vector else SAMPLE_ROWS, written.num_columns)
    values = torch.randn(shape, generator=made) * SPREAD + (1.0 if is_vector else 0.0)
    encoding, dtype = written.encoding, written.planes[0].dtype
    if encoding == "int4":
        tensors = pack_int4(values, getattr(torch, written.planes[1].dtype))
    elif encoding == "nvfp4":
        tensors = pack_nvfp4(values, second_scale(float(values.abs().max())))
    elif encoding in ("plain", "copy") or encoding in PLAIN:
        tensors = (values.to(getattr(torch, PLAIN.get(dtype, dtype))),)
    else:
        tensors = (quantize_blocks(values, encoding),)
    return tuple(one.contiguous().view(torch.uint8).numpy().tobytes() for one in tensors)


def _lone(written: Written) -> tuple[bytes, ...]:
    """Return planes without rows: the shape beside int4 codes, the one scale beside NVFP4 scales."""
    if written.encoding == "int4":
        return (torch.tensor([written.num_rows, written.num_columns]).numpy().tobytes(),)
    return (torch.tensor([second_scale(5 * SPREAD)]).numpy().tobytes(),) if written.encoding == "nvfp4" else ()


def _repeat(descriptor: int, offset: int, num_bytes: int, data: bytes) -> None:
    """Write `num_bytes` of a repeated sample."""
    piece = data * max(1, min(WRITE_BYTES, num_bytes) // len(data))
    ends = [*range(0, num_bytes, len(piece)), num_bytes]
    for start, end in pairwise(ends):
        view = memoryview(piece)[: end - start]
        while view:
            count = os.pwrite(descriptor, view, offset + end - len(view))
            view = view[count:]
