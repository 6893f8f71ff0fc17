"""Speed of a plan: tokens/s of one stream and of a batch, time to the first token, from bytes, FLOPs and the device; no torch."""

from collections.abc import Iterator
from typing import NamedTuple

from holdfast.memory.device_rates import (
    SHEETS,
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
from holdfast.planning.fit import Fit, PlanRequest
from holdfast.planning.resolve import Resolved
from holdfast.planning.step_time import StepLoad, step_seconds
from holdfast.planning.target import Target
from holdfast.planning.terms import Layout

SPEED_CONTEXT = 2048
"""Tokens of a prompt, and of the context of each sequence, that speeds are told for."""


class Range(NamedTuple):
    """Two bounds of an estimate."""

    low: float
    high: float

    @property
    def middle(self) -> float:
        """Geometric mean: as far from both bounds, as a ratio."""
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
    """Speed at the low bound, as a share of what is predicted."""
    fastest: float
    words: str
    """Where the rates come from."""


ON_H200 = 0.85, 1.17
"""All records of an H200 lie in it but a few (tests/planning/test_speed_records.py holds every one to 20 %)."""
ON_MEASURED_GPU = 0.75, 1.15
"""Rates are known; kernels were tuned on an H200."""
ON_OTHER_GPU = 0.65, 1.15
"""Neither are."""
ON_MEASURED_CPU, ON_OTHER_CPU = (0.75, 1.3), (0.4, 1.8)
GUESSED = 0.8
"""Factor on the low bound for a part of a step that no record has: exchange between ranks, launches without graphs."""


def estimate_speed(request: PlanRequest, fit: Fit) -> SpeedEstimate | None:
    """Estimate a plan that fits; None if bandwidth or FLOP/s of its device are unknown, or kernels do not run on it."""
    device = find_device_speed(request.target)
    if device is None:
        return None
    layout, resolved = fit.layout, fit.resolved
    for guess in _guesses(layout, device.rates):
        device = device._replace(slowest=GUESSED * device.slowest, words=f"{device.words}; {guess}")
    context = min(SPEED_CONTEXT, resolved.limits.max_model_len)
    batch_size = _batch_size(fit, context)

    def tokens_per_second(num_sequences: int) -> Range:
        rate = decode_rate(layout, resolved, device.rates, num_sequences, context)
        return Range(device.slowest * rate, device.fastest * rate)

    seconds = first_token_seconds(layout, resolved, device.rates, context)
    first = Range(seconds / device.fastest, seconds / device.slowest)
    assumption = f"contexts of {context:,} tokens; {device.words}"
    return SpeedEstimate(tokens_per_second(1), batch_size, tokens_per_second(batch_size), first, assumption)


def _guesses(layout: Layout, rates: Rates) -> Iterator[str]:
    """Parts of a step that nothing was measured for, in words."""
    if layout.mesh.tensor_size > 1:
        links = {"nvlink": "NVLink as published for H200", "pcie": "PCIe, assumed", "host": "gloo, assumed"}
        yield f"exchange of {layout.mesh.tensor_size} ranks over {links[rates.link]}"
    if layout.enforce_eager and rates.kind == "cuda":
        yield "launches without graphs, assumed"


def decode_rate(layout: Layout, resolved: Resolved, rates: Rates, num_sequences: int, context: float) -> float:
    """Tokens/s of so many sequences together. Every stage works on a part of them, and a token passes all stages."""
    num_stages = layout.mesh.num_stages
    load = StepLoad(-(-num_sequences // num_stages), context)
    return num_sequences / (num_stages * step_seconds(layout, resolved, rates, load))


def first_token_seconds(layout: Layout, resolved: Resolved, rates: Rates, prompt: int) -> float:
    """Seconds of the steps that read a prompt alone, through all stages."""
    seconds, done = 0.0, 0
    while done < prompt:
        rows = min(resolved.limits.max_num_batched_tokens, prompt - done)
        seconds += step_seconds(layout, resolved, rates, StepLoad(0, 0, rows, prompt_context=done))
        done += rows
    return seconds * layout.mesh.num_stages


def _batch_size(fit: Fit, context: int) -> int:
    """Sequences of so many tokens that fit together."""
    limits, pages = fit.resolved.limits, fit.layout.pages(fit.resolved)
    own = -(-context // limits.page_tokens)
    if pages is not None:
        own = sum(group.most_pages(context, 1) for group in pages.groups)
    return max(1, min(limits.max_num_seqs, fit.memory.num_pages // own))


def find_device_speed(target: Target, measured: tuple[Measured, ...] | None = None) -> DeviceSpeed | None:
    """The rates of a target: measured on this machine, else from data sheets; `measured` is left out to take what is kept."""
    kept = read_measured() if measured is None else measured
    if target.kind == "cpu":
        cpu, cores = measured_cpu(kept), num_cores()
        assumed = assumed_cpu_rates(cores)
        if cpu is None:
            words = f"{_told(assumed)} assumed for {cores} cores; holdfast doctor --measure finds what they do"
            return DeviceSpeed(assumed, *ON_OTHER_CPU, words)
        rates = with_measured(assumed, cpu)
        return DeviceSpeed(rates, *ON_MEASURED_CPU, f"{_told(rates)} as holdfast doctor measured on {cpu.date}")
    gpu = PLANNED_GPUS.get(target.key)
    if gpu is None or gpu.is_too_old:
        return None
    rates = sheet_rates(gpu.key)
    found = measured_gpu(kept, gpu.name, gpu.total_bytes)
    if found is not None:
        rates = with_measured(rates, found)
        own = ON_H200 if gpu is H200 else ON_MEASURED_GPU
        return DeviceSpeed(rates, *own, f"{_told(rates)} as holdfast doctor measured on {found.date}")
    if gpu is H200:
        return DeviceSpeed(rates, *ON_H200, f"{_told(rates)} as measured on an H200")
    sheet = SHEETS[gpu.key]
    words = f"{_told(rates)}: an H200's share of the data sheet's {sheet.gigabytes:,.0f} GB/s, not measured on this GPU"
    return DeviceSpeed(rates, *ON_OTHER_GPU, words)


def _told(rates: Rates) -> str:
    """Rates in words."""
    flops = rates.flops_per_second
    products = f"{flops / 1e12:,.0f} TFLOP/s" if flops >= 1e13 else f"{flops / 1e9:,.0f} GFLOP/s"
    return f"{rates.read_bytes_per_second / 1e9:,.0f} GB/s and {products}"
