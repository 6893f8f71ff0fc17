"""Fixtures of `check_at_home.py`: models in a folder, a local Hub, a terminal of a given width."""

import fcntl
import json
import os
import pty
import struct
import subprocess
import sys
import termios
from dataclasses import dataclass
from pathlib import Path

ALIGNMENT = 32
COMMIT = "0123456789abcdef0123456789abcdef01234567"
U16, I32 = 2, 5
"""Types of keys in GGUF."""


@dataclass(frozen=True)
class RawTensor:
    """A tensor of a GGUF file: its header entry and its bytes."""

    name: bytes
    num_dims: int
    dims_and_type: bytes
    data: bytes

    def info(self, offset: int) -> bytes:
        head = struct.pack("<Q", len(self.name)) + self.name + struct.pack("<I", self.num_dims)
        return head + self.dims_and_type + struct.pack("<Q", offset)


def read_raw(path: Path, first: bytes = b"token_embd.weight") -> tuple[int, bytes, list[RawTensor]]:
    """Return the number of keys, their raw bytes, and the tensors; the file's first tensor must be `first`."""
    data = path.read_bytes()
    _, _, num_tensors, num_keys = struct.unpack_from("<4sIQQ", data)
    start = place = data.index(struct.pack("<Q", len(first)) + first)
    found: list[tuple[bytes, int, bytes, int]] = []
    for _ in range(num_tensors):
        (length,) = struct.unpack_from("<Q", data, place)
        name = data[place + 8 : place + 8 + length]
        (num_dims,) = struct.unpack_from("<I", data, place + 8 + length)
        place += 12 + length
        size = 8 * num_dims + 4
        (offset,) = struct.unpack_from("<Q", data, place + size)
        found.append((name, num_dims, data[place : place + size], offset))
        place += size + 8
    base = -(-place // ALIGNMENT) * ALIGNMENT
    ends = sorted({offset for *_, offset in found} | {len(data) - base})
    tensors = [
        RawTensor(name, num_dims, shape, data[base + offset : base + ends[ends.index(offset) + 1]])
        for name, num_dims, shape, offset in found
    ]
    return num_keys, data[24:start], tensors


def write_raw(path: Path, num_keys: int, keys: bytes, tensors: list[RawTensor]) -> None:
    """Write a GGUF file from keys and tensors."""
    infos, offset = b"", 0
    for tensor in tensors:
        infos += tensor.info(offset)
        offset += -(-len(tensor.data) // ALIGNMENT) * ALIGNMENT
    head = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), num_keys) + keys + infos
    with path.open("wb") as file:
        for part in (head, *(tensor.data for tensor in tensors)):
            file.write(part + b"\0" * (-len(part) % ALIGNMENT))


def split_keys(place: int, count: int, num_tensors: int) -> bytes:
    """Return the three keys of a part of a split model."""
    keys = ((b"split.no", U16, "<H", place), (b"split.count", U16, "<H", count))
    keys = (*keys, (b"split.tensors.count", I32, "<i", num_tensors))
    return b"".join(
        struct.pack("<Q", len(name)) + name + struct.pack("<I", kind) + struct.pack(form, value)
        for name, kind, form, value in keys
    )


def make_gguf(folder: Path) -> None:
    """Write the default model in two parts, and again with its embedding repeated as its head."""
    from holdfast.loading.model_files import find_default_model

    default = find_default_model()
    if default is None:
        return
    num_keys, keys, tensors = read_raw(Path(default))
    (folder / "parts").mkdir()
    half = len(tensors) // 2
    first, second = (split_keys(place, 2, len(tensors)) for place in (0, 1))
    write_raw(folder / "parts" / "smollm-00001-of-00002.gguf", num_keys + 3, keys + first, tensors[:half])
    write_raw(folder / "parts" / "smollm-00002-of-00002.gguf", 3, second, tensors[half:])
    [embedding] = [tensor for tensor in tensors if tensor.name == b"token_embd.weight"]
    head = RawTensor(b"output.weight", embedding.num_dims, embedding.dims_and_type, embedding.data)
    write_raw(folder / "untied.gguf", num_keys, keys, [*tensors, head])


def make_files(folder: Path) -> None:
    """Write every file of the checks: a tiny model, one without `architectures`, one in the Hub's cache, and GGUF files."""
    from cli.cli_models import make_model  # pyright: ignore[reportMissingImports]

    make_model(folder / "tiny")
    make_model(folder / "untyped")
    config = json.loads((folder / "untyped" / "config.json").read_text())
    del config["architectures"]
    (folder / "untyped" / "config.json").write_text(json.dumps(config))
    cached = folder / "hf" / "hub" / "models--org--cached"
    make_model(cached / "snapshots" / COMMIT)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(COMMIT)
    make_gguf(folder)


def sharded(folder: Path) -> dict[str, bytes]:
    """Return the files of a tiny model in three shards, by name."""
    from safetensors.numpy import load_file, save

    tensors = load_file(folder / "model.safetensors")
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "model.safetensors"}
    weight_map: dict[str, str] = {}
    for place in range(3):
        shard = f"model-{place + 1:05}-of-00003.safetensors"
        names = sorted(tensors)[place::3]
        files[shard] = save({name: tensors[name] for name in names})
        weight_map |= dict.fromkeys(names, shard)
    files["model.safetensors.index.json"] = json.dumps({"metadata": {}, "weight_map": weight_map}).encode()
    return files


def with_hub(words: list[str]) -> int:
    """Run a command beside a server with the Hub's protocol, and print the fetched files."""
    from loading.hub.local_hub import Repo, serving  # pyright: ignore[reportMissingImports]

    files = sharded(Path("tiny"))
    other = files | {"config.json": files["config.json"].replace(b'_embeddings": 256', b'_embeddings": 77')}
    junk = {"pytorch_model.bin": b"pickle", "README.md": b"words", "onnx/model.onnx": b"graph"}
    gguf = {"m-Q4_K_M.gguf": b"GGUF four", "mmproj-F16.gguf": b"GGUF eyes"}
    gguf |= {f"m-Q8_0-0000{part}-of-00002.gguf": b"GGUF eight, part %d" % part for part in (1, 2)}
    with serving() as hub:
        for name in ("tiny", "run", "cut", "room"):
            hub.repos[f"org/{name}"] = Repo(files | junk, other_refs={"v1": other})
        hub.repos["org/tiny-GGUF"] = Repo(gguf, gguf={"architecture": "llama"})
        if os.environ.get("HUB_CUTS"):
            hub.cuts["model-00002-of-00003.safetensors"] = 50_000
        settings = {"HF_ENDPOINT": hub.address, "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
        kept = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
        code = subprocess.run(words, env=kept | settings, check=False).returncode
        fetched = [(path, span) for method, path, span in hub.asked if method == "GET" and "/api/" not in path]
    for path, span in fetched:
        print(f"fetched {path.rpartition('/')[2]}{' from ' + span if span else ''}", flush=True)
    return code


def at_terminal(columns: int, words: list[str]) -> int:
    """Run a command in a terminal with this many columns, and print its output."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ["TERM"] = "xterm"
        fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
        os.execvp(words[0], words)
    while True:
        try:
            data = os.read(terminal, 65536)
        except OSError:
            break
        if not data:
            break
        sys.stdout.buffer.write(data.replace(b"\r\n", b"\n"))
    sys.stdout.flush()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


if __name__ == "__main__":
    what, *rest = sys.argv[1:]
    if what == "files":
        make_files(Path(rest[0]))
    elif what == "hub":
        sys.exit(with_hub(rest))
    else:
        sys.exit(at_terminal(int(rest[0]), rest[1:]))
