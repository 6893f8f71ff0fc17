"""llama.cpp's side of benchmarks/cpu_peers.py: a process with llama-cpp-python that times products and models on request.

It reads one JSON object a line and answers with one. It imports nothing of Holdfast, so any Python with llama_cpp runs it.
"""

import ctypes
import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import llama_cpp  # type: ignore[import-not-found]
import numpy as np

LIBRARIES = Path(str(llama_cpp.__file__)).parent / "lib"
TYPES = {
    "Q4_0": 2,
    "Q4_1": 3,
    "Q5_0": 6,
    "Q5_1": 7,
    "Q8_0": 8,
    "Q2_K": 10,
    "Q3_K": 11,
    "Q4_K": 12,
    "Q5_K": 13,
    "Q6_K": 14,
    "IQ4_NL": 20,
    "IQ4_XS": 23,
    "MXFP4": 39,
}
F32 = 0
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
clock = CLOCKS["wall"]
POINTER = ctypes.c_void_p


class InitParams(ctypes.Structure):
    """Argument of ggml_init."""

    _fields_ = [("mem_size", ctypes.c_size_t), ("mem_buffer", POINTER), ("no_alloc", ctypes.c_bool)]


def load() -> Any:  # noqa: ANN401 a namespace
    """Return every function of ggml that is used here, with its types."""
    base = ctypes.CDLL(str(LIBRARIES / "libggml-base.so"), mode=ctypes.RTLD_GLOBAL)
    cpu = ctypes.CDLL(str(LIBRARIES / "libggml-cpu.so"), mode=ctypes.RTLD_GLOBAL)
    long, size, integer = ctypes.c_int64, ctypes.c_size_t, ctypes.c_int
    known = {
        "ggml_init": (base, POINTER, [InitParams]),
        "ggml_free": (base, None, [POINTER]),
        "ggml_new_tensor_2d": (base, POINTER, [POINTER, integer, long, long]),
        "ggml_mul_mat": (base, POINTER, [POINTER, POINTER, POINTER]),
        "ggml_nbytes": (base, size, [POINTER]),
        "ggml_new_graph_custom": (base, POINTER, [POINTER, size, ctypes.c_bool]),
        "ggml_build_forward_expand": (base, None, [POINTER, POINTER]),
        "ggml_quantize_chunk": (base, size, [integer, POINTER, POINTER, long, long, long, POINTER]),
        "ggml_backend_alloc_ctx_tensors_from_buft": (base, POINTER, [POINTER, POINTER]),
        "ggml_backend_buffer_free": (base, None, [POINTER]),
        "ggml_backend_buft_name": (base, ctypes.c_char_p, [POINTER]),
        "ggml_backend_tensor_set": (base, None, [POINTER, POINTER, size, size]),
        "ggml_backend_tensor_get": (base, None, [POINTER, POINTER, size, size]),
        "ggml_backend_graph_compute": (base, integer, [POINTER, POINTER]),
        "ggml_backend_reg_dev_get": (base, POINTER, [POINTER, size]),
        "ggml_backend_dev_supports_op": (base, ctypes.c_bool, [POINTER, POINTER]),
        "ggml_backend_reg_get_proc_address": (base, POINTER, [POINTER, ctypes.c_char_p]),
        "ggml_backend_cpu_init": (cpu, POINTER, []),
        "ggml_backend_cpu_set_n_threads": (cpu, None, [POINTER, integer]),
        "ggml_backend_cpu_reg": (cpu, POINTER, []),
        "ggml_backend_cpu_buffer_type": (base, POINTER, []),
    }
    functions = {}
    for name, (library, result, arguments) in known.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
        functions[name.removeprefix("ggml_")] = function
    return type("ggml", (), {name: staticmethod(function) for name, function in functions.items()})


ggml = load()


def weight_buffers() -> list[int]:
    """Return the buffer types that a model's weights may take, the preferred one first: repacked, then plain."""
    registry = ggml.backend_cpu_reg()
    device = ggml.backend_reg_dev_get(registry, 0)
    address = ggml.backend_reg_get_proc_address(registry, b"ggml_backend_dev_get_extra_bufts")
    extra = ctypes.CFUNCTYPE(ctypes.POINTER(POINTER), POINTER)(address)(device) if address else None
    found = []
    while extra and extra[len(found)]:
        found.append(extra[len(found)])
    return [*found, ggml.backend_cpu_buffer_type()]


class Product:
    """A graph of one product for each copy of a weight [N, K], so that weights come from memory and not from a cache."""

    def __init__(self, kind: str, blocks: bytes, size_n: int, size_k: int, copies: int, threads: int) -> None:
        self.kind, self.sizes, self.copies = TYPES[kind], (size_n, size_k), copies
        self.backend = ggml.backend_cpu_init()
        ggml.backend_cpu_set_n_threads(self.backend, threads)
        for buffer_type in weight_buffers():
            self.context = ggml.init(InitParams(1 << 22, None, True))
            self.weights = [ggml.new_tensor_2d(self.context, self.kind, size_k, size_n) for _ in range(copies)]
            self.buffer = ggml.backend_alloc_ctx_tensors_from_buft(self.context, buffer_type)
            self.place = ggml.backend_buft_name(buffer_type).decode()
            if self.buffer and (buffer_type == ggml.backend_cpu_buffer_type() or self._runs()):
                break
        for weight in self.weights:
            ggml.backend_tensor_set(weight, blocks, 0, len(blocks))

    def _runs(self) -> bool:
        """Return whether the device multiplies from this buffer: the repacked one takes some types and sizes."""
        context = ggml.init(InitParams(1 << 20, None, True))
        x = ggml.new_tensor_2d(context, F32, self.sizes[1], 4)
        device = ggml.backend_reg_dev_get(ggml.backend_cpu_reg(), 0)
        return ggml.backend_dev_supports_op(device, ggml.mul_mat(context, self.weights[0], x))

    def run(self, x: np.ndarray, rounds: int) -> tuple[list[float], np.ndarray]:
        """Return the seconds of one product in each round, and the result."""
        size_n, size_k = self.sizes
        context = ggml.init(InitParams(1 << 23, None, True))
        inputs = ggml.new_tensor_2d(context, F32, size_k, len(x))
        outputs = [ggml.mul_mat(context, weight, inputs) for weight in self.weights]
        graph = ggml.new_graph_custom(context, 4096, False)
        for output in outputs:
            ggml.build_forward_expand(graph, output)
        buffer = ggml.backend_alloc_ctx_tensors_from_buft(context, ggml.backend_cpu_buffer_type())
        ggml.backend_tensor_set(inputs, x.ctypes.data, 0, x.nbytes)
        seconds = []
        ggml.backend_graph_compute(self.backend, graph)
        for _ in range(rounds):
            began = clock()
            ggml.backend_graph_compute(self.backend, graph)
            seconds.append((clock() - began) / self.copies)
        result = np.empty((len(x), size_n), np.float32)
        ggml.backend_tensor_get(outputs[0], result.ctypes.data, 0, result.nbytes)
        ggml.backend_buffer_free(buffer)
        ggml.free(context)
        return seconds, result

    def close(self) -> None:
        ggml.backend_buffer_free(self.buffer)
        ggml.free(self.context)


class Model:
    """A model file, with its context."""

    def __init__(self, path: str, threads: int, most_tokens: int) -> None:
        LOG.clear()
        llama_cpp.llama_log_set(_KEEP, None)
        self.model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
        if not self.model:
            raise RuntimeError("".join(LOG[-3:]))
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx = 8 * most_tokens
        parameters.n_batch = parameters.n_ubatch = 512
        parameters.n_seq_max = 8
        parameters.kv_unified = True
        parameters.n_threads = parameters.n_threads_batch = threads
        self.context = llama_cpp.llama_init_from_model(self.model, parameters)
        self.batch = llama_cpp.llama_batch_init(512, 0, 1)

    @property
    def buffer_mib(self) -> dict[str, float]:
        """MiB of its buffers by kind, as it logged them: model, KV, compute, output."""
        found: dict[str, float] = {}
        for kind, size in re.findall(r"(model|KV|compute|output) buffer size =\s*([0-9.]+) MiB", "".join(LOG)):
            # Repacked tensors are listed again beside the mapped file, whose pages they free.
            found[kind] = (
                max(found.get(kind, 0.0), float(size)) if kind == "model" else found.get(kind, 0.0) + float(size)
            )
        return found

    def prefill(self, num_tokens: int) -> float:
        """Return the seconds of one prompt in one step, with the logits of its last token."""
        self._clear()
        self._fill([(1000 + i, i, 0, i == num_tokens - 1) for i in range(num_tokens)])
        return self._decode()

    def decode(self, num_sequences: int, num_prompt: int, num_steps: int) -> float:
        """Return the seconds of a step, after a prompt for each sequence."""
        self._clear()
        for sequence in range(num_sequences):
            self._fill([(1000 + i + sequence, i, sequence, i == num_prompt - 1) for i in range(num_prompt)])
            self._decode()
        total = 0.0
        for step in range(num_steps):
            self._fill([(2000 + step, num_prompt + step, sequence, True) for sequence in range(num_sequences)])
            total += self._decode()
        return total / num_steps

    def _clear(self) -> None:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)

    def _fill(self, tokens: list[tuple[int, int, int, bool]]) -> None:
        self.batch.n_tokens = len(tokens)
        for i, (token, position, sequence, has_logits) in enumerate(tokens):
            self.batch.token[i], self.batch.pos[i], self.batch.logits[i] = token, position, has_logits
            self.batch.n_seq_id[i], self.batch.seq_id[i][0] = 1, sequence

    def _decode(self) -> float:
        began = clock()
        code = llama_cpp.llama_decode(self.context, self.batch)
        llama_cpp.llama_synchronize(self.context)
        if code:
            raise RuntimeError(f"llama_decode returned {code}")
        return clock() - began

    def close(self) -> None:
        llama_cpp.llama_batch_free(self.batch)
        llama_cpp.llama_free(self.context)
        llama_cpp.llama_model_free(self.model)


LOG: list[str] = []
"""What llama.cpp logged since the last model."""


@llama_cpp.llama_log_callback
def _KEEP(level: int, text: bytes, data: object) -> None:  # noqa: N802
    """Keep what llama.cpp logs."""
    LOG.append(text.decode(errors="replace"))


def quantize(kind: str, source: str, size_n: int, size_k: int, target: str) -> int:
    """Write the blocks of a float32 file, and return their bytes."""
    values = np.fromfile(source, np.float32)
    blocks = np.empty(values.nbytes, np.uint8)
    used = ggml.quantize_chunk(TYPES[kind], values.ctypes.data, blocks.ctypes.data, 0, size_n, size_k, None)
    blocks[:used].tofile(target)
    return used


def main() -> None:
    """Answer requests until the input ends."""
    global clock
    held: Any = None
    for line in sys.stdin:
        request = json.loads(line)
        action = request.pop("do")
        answer: object = None
        if action == "version":
            answer = llama_cpp.__version__
        elif action == "set_clock":
            clock = CLOCKS[request["name"]]
        elif action == "quantize":
            answer = quantize(**request)
        elif action == "hold_product":
            blocks = Path(request.pop("blocks")).read_bytes()
            held = Product(blocks=blocks, **request)
            answer = held.place
        elif action == "run_product":
            x = np.fromfile(request["x"], np.float32).reshape(request["rows"], -1)
            seconds, result = held.run(x, request["rounds"])
            result.tofile(request["result"])
            answer = seconds
        elif action == "hold_model":
            held = Model(**request)
            answer = held.buffer_mib
        elif action == "prefill":
            answer = held.prefill(**request)
        elif action == "decode":
            answer = held.decode(**request)
        elif action == "drop":
            held.close()
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
