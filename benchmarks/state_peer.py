"""Kernels of flash-linear-attention from a folder of packages, over the inputs of a layer's rig in `gpu_state.py`.

    pip install --target FOLDER --no-deps fla-core einops

Inputs are copied into the layouts that those kernels take, before anything is measured. Decode of theirs writes a second state.

N sequences, L tokens, H heads, C channels
"""

import importlib
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from holdfast.kernels.state.delta_inputs import DeltaInputs

NUM_THREADS = 16
"""Configurations compiled at once: each kernel has up to 32 to choose from."""


class Peer(NamedTuple):
    """Functions of flash-linear-attention."""

    version: str
    chunks: Callable[..., Any]
    recurrent: Callable[..., Any]
    conv: Callable[..., Any] | None

    def calls(
        self, inputs: DeltaInputs, x_TC: torch.Tensor, weight_CW: torch.Tensor, state_LPHKV: torch.Tensor, decode: bool
    ) -> dict[str, Callable[[int], Any]]:
        """Return the layer's operations by name; each takes the number of a layer."""
        q, k, v, a, b = (_by_sequence(x, decode) for x in inputs[:5])
        gates = {"A_log": inputs.A_log_H, "dt_bias": inputs.dt_bias_H, "use_gate_in_kernel": True}
        common = {
            "g": a, "beta": b, "use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True,
            "output_final_state": True, **gates,
        }  # fmt: skip
        if decode:
            return {
                "step": lambda layer: self.recurrent(q, k, v, initial_state=state_LPHKV[layer], **common),
            }
        calls = {"chunks": lambda layer: self.chunks(q, k, v, **common)}
        conv = self.conv
        if conv is not None:
            x_NLC = x_TC.unsqueeze(0)
            calls["convolution"] = lambda layer: conv(x_NLC, weight_CW, activation="silu", output_final_state=True)
        return calls


def _by_sequence(x_TX: torch.Tensor, decode: bool) -> torch.Tensor:
    return (x_TX.unsqueeze(1) if decode else x_TX.unsqueeze(0)).contiguous()


def load_peer(folder: Path | None) -> Peer | None:
    """Import the kernels; None, and a line that says why, if they cannot be imported."""
    if folder is None:
        return None
    sys.path.append(str(folder.resolve()))
    try:
        package, rule = (importlib.import_module(name) for name in ("fla", "fla.ops.gated_delta_rule"))
        conv = getattr(importlib.import_module("fla.modules.causal_conv1d"), "causal_conv1d", None)
        return Peer(package.__version__, rule.chunk_gated_delta_rule, rule.fused_recurrent_gated_delta_rule, conv)
    except Exception as error:
        print(f"flash-linear-attention is not there: {type(error).__name__}: {str(error).splitlines()[0]}", flush=True)
        return None


@contextmanager
def compiled_at_once() -> Iterator[None]:
    """Compile the configurations that an autotuner chooses from in threads, before it measures them one by one."""
    from triton.runtime.autotuner import Autotuner

    run, known = Autotuner.run, set()

    def run_compiled(self, *args: Any, **keywords: Any) -> Any:  # noqa: ANN001, ANN401 of any kernel
        named = dict(zip(self.arg_names, args, strict=False)) | keywords
        key = id(self), *(str(named.get(name)) for name in self.keys)
        if key not in known and len(self.configs) > 1:
            known.add(key)
            start = time.monotonic()
            words = keywords | {"warmup": True}
            with ThreadPoolExecutor(NUM_THREADS) as pool:
                tasks = [pool.submit(self.fn.run, *args, **words, **config.all_kwargs()) for config in self.configs]
            num_failed = sum(task.exception() is not None for task in tasks)
            seconds = time.monotonic() - start
            print(f"{self.base_fn.__name__}: {len(tasks)} compiled in {seconds:.1f} s, {num_failed} failed", flush=True)
        return run(self, *args, **keywords)

    Autotuner.run = run_compiled
    try:
        yield
    finally:
        Autotuner.run = run
