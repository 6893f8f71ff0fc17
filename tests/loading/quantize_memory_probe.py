"""A process that quantizes one model to some targets and prints how much memory each took; run by its test.

python quantize_memory_probe.py FOLDER TARGET ... writes the model and quantizes it.
"""

import json
import sys
from math import prod
from pathlib import Path

import torch

from cli.cli_models import CONFIG
from holdfast.loading.convert import TokenizerForms, plan_conversion, write_conversion
from holdfast.loading.model_files import open_model
from holdfast.memory.profiler import anonymous_bytes
from holdfast.models.grouped_readers import parameters, read_spec
from loading.host_memory_probe import PeakWatch

SIZES = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 2, "vocab_size": 8192, "head_dim": 128}


def write_model(folder: Path) -> None:
    """A Llama in bfloat16; numbers repeat, which a conversion does not see."""
    folder.mkdir()
    config = CONFIG | SIZES | {"dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    header, end = {}, 0
    for part in (part for each in parameters(read_spec(config)) for part in each.parts):
        start, end = end, end + 2 * prod(part.shape)
        header[part.tensor] = {"dtype": "BF16", "shape": list(part.shape), "data_offsets": [start, end]}
    numbers = (torch.randn(2**18, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
    raw, text = numbers.view(torch.uint8).numpy().tobytes(), json.dumps(header).encode()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for start in range(0, end, len(raw)):
            file.write(raw[: end - start])


def main() -> None:
    folder, *targets = sys.argv[1:]
    torch.set_num_threads(1)
    write_model(Path(folder) / "m")
    for target in targets:
        conversion = plan_conversion(open_model(str(Path(folder) / "m"), "auto"), target, TokenizerForms(dict, dict))
        before = anonymous_bytes() or 0
        watch = PeakWatch()
        watch.start()
        write_conversion(conversion, Path(folder) / target, lambda done, total: None)
        over = watch.end() - before
        print(json.dumps({"target": target, "over": over, "read": conversion.plan.before_bytes}), flush=True)


if __name__ == "__main__":
    main()
