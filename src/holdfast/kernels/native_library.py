"""CPU kernels in C: compiled once, kept in the user's cache, and loaded. No other module loads C.

For a few decode rows, a BLAS copies the whole weight, and it is not batch invariant. Without a compiler the torch
references run instead.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import cache
from pathlib import Path
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from holdfast.memory.cache_folder import private_folder
from holdfast.observability.log import get_logger

NATIVE_VARIABLE = "HOLDFAST_NATIVE"
SOURCES = Path(__file__).parent / "native"
FLAGS = ("-O3", "-march=native", "-fopenmp", "-ffp-contract=off", "-fno-math-errno", "-fPIC")
COMPILE_SECONDS = 120
OnCompile = Callable[[Path, int, int], None]
"""Receives the library's path, the files compiled so far, beginning with 0, and the number of files."""

_POINTER, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_long, ctypes.c_float
SIGNATURES: dict[str, list[type]] = {
    "holdfast_linear": [_POINTER] * 4 + [_LONG] * 3,
    "holdfast_quantized_linear": [_POINTER] * 5 + [_LONG] * 6,
    "holdfast_packed_linear": [_POINTER] * 5 + [_LONG] * 5,
    "holdfast_packed_linear_full": [_POINTER] * 4 + [_LONG] * 5,
    "holdfast_packed_rows": [_POINTER] * 3 + [_LONG] * 3,
    "holdfast_place_blocks": [_POINTER] * 2 + [_LONG] * 6 + [_POINTER],
    "holdfast_split_blocks": [_POINTER] * 2 + [_LONG] * 6,
    "holdfast_quantize_blocks": [_POINTER] * 2 + [_LONG] * 2,
    "holdfast_layer": [_POINTER] * 2 + [_LONG],
    "holdfast_add_rms_norm": [_POINTER] * 4 + [_LONG] * 2 + [_FLOAT] * 2,
    "holdfast_rms_norm": [_POINTER] * 3 + [_LONG] * 2 + [_FLOAT] * 2,
    "holdfast_silu_mul": [_POINTER] * 2 + [_LONG] * 2,
    "holdfast_clamped_gate": [_POINTER] * 2 + [_LONG] * 4 + [_FLOAT],
    "holdfast_activate": [_POINTER] + [_LONG] * 2,
    "holdfast_gate_heads": [_POINTER] * 3 + [_LONG] * 5,
    "holdfast_write_heads": [_POINTER] * 6 + [_FLOAT] * 2 + [_POINTER] * 3 + [_LONG] * 6,
    "holdfast_mask_logits": [_POINTER] * 2 + [_LONG] * 2,
    "holdfast_paged_attention": [_POINTER] * 7 + [_LONG] * 6 + [_FLOAT] * 2,
    "holdfast_add_checksum": [_POINTER] + [_LONG] * 2 + [_POINTER],
}
NATIVE_CODES = {"float8_e4m3fn": 0, "int8": 1, "uint8": 2}
"""Code types of quantized weights by their number in native/codes.h."""
log = get_logger(__name__)


@cache
def native_library() -> ctypes.CDLL | None:
    """Return the library compiled for this machine, or None; the log says why."""
    try:
        build = find_native_build()
    except OSError as error:
        log.warning("CPU kernels run in plain torch because %s", error)
        return None
    try:
        if build.path.exists():
            try:
                return _open(build.path)
            except (OSError, AttributeError) as error:
                log.warning("%s is damaged and is compiled again: %s", build.path, error)
        _compile(build, lambda path, num_done, num_total: None)
        return _open(build.path)
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("CPU kernels run in plain torch because compiling them failed: %s", _message(error)[:300])
        return None


def compile_native(on_compile: OnCompile) -> None:
    """Compile the kernels unless they are compiled. Errors are only logged: `native_library` reports them."""
    if native_library.cache_info().currsize:
        return
    try:
        build = find_native_build()
        if not build.path.exists():
            _compile(build, on_compile)
    except (OSError, subprocess.SubprocessError) as error:
        log.debug("compiling the CPU kernels failed: %s", _message(error))


def native_for(*tensors: Tensor | None) -> ctypes.CDLL | None:
    """Return the library if it can run on these tensors (dense float32 on the CPU), else None."""
    for tensor in tensors:
        if tensor is not None and not (tensor.dtype is torch.float32 and tensor.is_cpu and tensor.is_contiguous()):
            return None
    return native_library()


class NativeBuild(NamedTuple):
    """The compiler, and the path of the library, which may not exist yet."""

    compiler: str
    path: Path


def find_native_build() -> NativeBuild:
    """Find the compiler and the library's path without compiling. Raise OSError with the reason if there is none."""
    if os.environ.get(NATIVE_VARIABLE, "1") == "0":
        raise OSError(f"{NATIVE_VARIABLE}=0")
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise OSError("no C compiler is found; install gcc for about twice the speed")
    try:
        return NativeBuild(compiler, _library_path(compiler))
    except OSError as error:
        raise OSError(f"compiling them failed: {_message(error)[:300]}") from error


def _message(error: Exception) -> str:
    if isinstance(error, subprocess.TimeoutExpired):
        return f"the compiler took more than {COMPILE_SECONDS} seconds"
    if isinstance(error, subprocess.CalledProcessError):
        return str(error.stderr).strip() or f"the compiler ended with {error.returncode}"
    return str(error)


def _open(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    for name, arguments in SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes = arguments
        function.restype = None
    return library


def _library_path(compiler: str) -> Path:
    """Return a path keyed by the sources, flags, compiler, machine and torch's OpenMP library."""
    identity = hashlib.blake2b(digest_size=12)
    for source in sorted(SOURCES.iterdir()):
        if source.suffix in (".c", ".h"):
            identity.update(source.read_bytes())
    built_with = str(os.stat(compiler).st_mtime_ns), platform.machine(), _cpu_model(), str(_openmp_library())
    facts = (*FLAGS, compiler, *built_with)
    identity.update("\n".join(facts).encode())
    return private_folder() / f"kernels-{identity.hexdigest()}.so"


def _compile(build: NativeBuild, on_compile: OnCompile) -> None:
    """Compile every file in parallel, then link one library."""
    openmp = _openmp_library()
    sources = sorted(SOURCES.glob("*.c"))
    log.info("Compiling CPU kernels with %s, once; they are kept in %s", build.compiler, build.path)
    deadline = time.monotonic() + COMPILE_SECONDS
    on_compile(build.path, 0, len(sources))

    def run(arguments: Sequence[str]) -> None:
        command, left = [build.compiler, *FLAGS, *arguments], max(deadline - time.monotonic(), 0.001)
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=left)

    with tempfile.TemporaryDirectory(dir=build.path.parent) as scratch:
        objects = [Path(scratch) / f"{source.stem}.o" for source in sources]
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            pairs = zip(sources, objects, strict=True)
            jobs = [pool.submit(run, ("-c", "-o", str(target), str(source))) for source, target in pairs]
            for num_done, one in enumerate(as_completed(jobs), 1):
                one.result()
                on_compile(build.path, num_done, len(sources))
        output = Path(scratch) / build.path.name
        run(("-shared", "-o", str(output), *map(str, objects), *([str(openmp)] if openmp else []), "-lm"))
        with open(output, "rb") as library:
            os.fsync(library.fileno())  # a crash must not leave half a library under the final name
        os.replace(output, build.path)


class _SymbolPlace(ctypes.Structure):
    """Result struct of dladdr (Dl_info)."""

    _fields_: ClassVar = [("file", ctypes.c_char_p), ("base", _POINTER), ("symbol", ctypes.c_char_p), ("at", _POINTER)]


def _openmp_library() -> Path | None:
    """Return torch's OpenMP library: a second one would compete for the cores with its own threads."""
    try:
        torch_library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        function = ctypes.cast(torch_library.omp_get_max_threads, ctypes.c_void_p)
        place = _SymbolPlace()
        found = ctypes.CDLL(None).dladdr(function, ctypes.byref(place))
    except (OSError, AttributeError):  # not Linux, or a torch without OpenMP
        return None
    return Path(os.fsdecode(place.file)) if found and place.file else None


def _cpu_model() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in text.splitlines() if line.startswith(("flags", "Features", "CPU part"))}))
