"""Speed of a plan: tokens/s of one stream and of a batch, time to the first token, from bytes, FLOPs and the device; no torch."""

from collections.abc import Iterator
from typing import NamedTuple

from holdfast.memory.device_rates import (
    Measured,
    Rates,
    assumed_cpu_rates,
    measured_cpu,
    measured_gpu,
    num_cores,
    read_measured,
    sheet_rates,
    with_measured,
)
from holdfast.memory.devices import H200, PLANNED_GPUS
from holdfast.planning.fit import RunnerPlan
from holdfast.planning.resolve import Resolved
from holdfast.planning.step_time import StepLoad, step_seconds
from holdfast.planning.target import Target

SPEED_CONTEXT = 2048
"""Tokens of the prompt, and of the context of each sequence, of an estimate."""


class Range(NamedTuple):
    """Bounds of an estimate."""

    low: float
    high: float

    @property
    def middle(self) -> float:
        """Geometric mean: the same ratio to both bounds."""
        return (self.low * self.high) ** 0.5


class SpeedEstimate(NamedTuple):
    """Speed of one engine on one device, or on the ranks of a config."""

    one_stream: Range
    """Tokens/s of one sequence."""
    batch_size: int
    """Sequences that fit at the assumption's context, at most max_num_seqs."""
    batch: Range
    """Tokens/s of all of them together."""
    first_token_seconds: Range
    """Seconds from a prompt of 2,048 tokens, or of the longest context, to its first token."""
    assumption: str
    """One sentence: contexts, and which bandwidth and FLOP/s the estimate takes."""


class DeviceSpeed(NamedTuple):
    """The rates of a plan's device, and how far they can be trusted."""

    rates: Rates
    slowest: float
    """Ratio of the low bound to the predicted speed."""
    fastest: float
    source: str
    """Where the rates come from."""


ON_H200 = 0.85, 1.17
"""Bounds that hold for all but a few H200 records (tests/planning/test_speed_records.py holds each to 20 %)."""
ON_MEASURED_GPU = 0.75, 1.15
"""Rates are measured, but kernels were tuned on an H200."""
ON_OTHER_GPU = 0.65, 1.15
"""Rates are not measured, and kernels were tuned on an H200."""
ON_MEASURED_CPU, ON_OTHER_CPU = (0.75, 1.3), (0.4, 1.8)
GUESSED = 0.8
"""Factor on the low bound for a part of a step that no record has: exchange between ranks, launches without graphs."""


def estimate_speed(fit: RunnerPlan) -> SpeedEstimate | None:
    """Estimate a plan that fits; None if bandwidth or FLOP/s of its device are unknown, or kernels do not run on it."""
    resolved, device = fit.resolved, find_device_speed(fit.target)
    if device is None:
        return None
    for guess in _guesses(resolved, device.rates):
        device = device._replace(slowest=GUESSED * device.slowest, source=f"{device.source}; {guess}")
    context = min(SPEED_CONTEXT, resolved.limits.max_model_len)
    batch_size = _batch_size(fit, context)

    def tokens_per_second(num_sequences: int) -> Range:
        rate = decode_rate(resolved, device.rates, num_sequences, context)
        return Range(device.slowest * rate, device.fastest * rate)

    seconds = first_token_seconds(resolved, device.rates, context)
    first = Range(seconds / device.fastest, seconds / device.slowest)
    assumption = f"contexts of {context:,} tokens; {device.source}"
    return SpeedEstimate(tokens_per_second(1), batch_size, tokens_per_second(batch_size), first, assumption)


def _guesses(resolved: Resolved, rates: Rates) -> Iterator[str]:
    """Name the parts of a step without a measurement."""
    if resolved.mesh.tensor_size > 1:
        links = {"nvlink": "NVLink as published for H200", "pcie": "PCIe, assumed", "host": "gloo, assumed"}
        yield f"exchange of {resolved.mesh.tensor_size} ranks over {links[rates.link]}"
    if resolved.enforce_eager and rates.kind == "cuda":
        yield "launches without graphs, assumed"


def decode_rate(resolved: Resolved, rates: Rates, num_sequences: int, context: float) -> float:
    """Return the tokens/s of so many sequences together. Each stage works on a part of them; a token passes all stages."""
    num_stages = resolved.mesh.num_stages
    load = StepLoad(-(-num_sequences // num_stages), context)
    return num_sequences / (num_stages * step_seconds(resolved, rates, load))


def first_token_seconds(resolved: Resolved, rates: Rates, prompt: int) -> float:
    """Return the seconds of prefilling one prompt alone, through all stages."""
    seconds, done = 0.0, 0
    while done < prompt:
        rows = min(resolved.limits.max_num_batched_tokens, prompt - done)
        seconds += step_seconds(resolved, rates, StepLoad(0, 0, rows, prompt_context=done))
        done += rows
    return seconds * resolved.mesh.num_stages


def _batch_size(fit: RunnerPlan, context: int) -> int:
    """Count the sequences of so many tokens that fit together."""
    limits, pages = fit.resolved.limits, fit.resolved.pages()
    own = -(-context // limits.page_tokens)
    if pages is not None:
        own = sum(group.most_pages(context, 1) for group in pages.groups)
    return max(1, min(limits.max_num_seqs, fit.memory.num_pages // own))


def find_device_speed(target: Target, measured: tuple[Measured, ...] | None = None) -> DeviceSpeed | None:
    """Return a target's rates: measured on this machine, else from data sheets. `measured` defaults to the kept records."""
    kept = read_measured() if measured is None else measured
    if target.kind == "cpu":
        cpu, cores = measured_cpu(kept), num_cores()
        assumed = assumed_cpu_rates(cores)
        if cpu is None:
            source = f"{_printed(assumed)} assumed for {cores} cores; holdfast doctor --measure finds what they do"
            return DeviceSpeed(assumed, *ON_OTHER_CPU, source)
        rates = with_measured(assumed, cpu)
        return DeviceSpeed(rates, *ON_MEASURED_CPU, f"{_printed(rates)} as holdfast doctor measured on {cpu.date}")
    gpu = PLANNED_GPUS.get(target.key)
    if gpu is None or gpu.is_too_old:
        return None
    rates = sheet_rates(gpu.key)
    found = measured_gpu(kept, gpu.name, gpu.total_bytes)
    if found is not None:
        rates = with_measured(rates, found)
        own = ON_H200 if gpu is H200 else ON_MEASURED_GPU
        return DeviceSpeed(rates, *own, f"{_printed(rates)} as holdfast doctor measured on {found.date}")
    if gpu is H200:
        return DeviceSpeed(rates, *ON_H200, f"{_printed(rates)} as measured on an H200")
    sheet = gpu.sheet
    source = (
        f"{_printed(rates)}: an H200's share of the data sheet's {sheet.gigabytes:,.0f} GB/s, not measured on this GPU"
    )
    return DeviceSpeed(rates, *ON_OTHER_GPU, source)


def _printed(rates: Rates) -> str:
    flops = rates.flops_per_second
    products = f"{flops / 1e12:,.0f} TFLOP/s" if flops >= 1e13 else f"{flops / 1e9:,.0f} GFLOP/s"
    return f"{rates.read_bytes_per_second / 1e9:,.0f} GB/s and {products}"
