"""Known GPUs by name with the memory that CUDA reports, and the free memory of this host; no torch."""

import difflib
import json
import os
import re
from collections.abc import Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from holdfast.errors import ConfigError, shown
from holdfast.memory.profiler import named_bytes

MIB = 1024**2
GIB = 1024**3
CONTEXT_BYTES = 757 * MIB
"""CUDA's context, library handles and the code of all kernels of a serving engine: 793.6 MB on an H200."""
SPLIT_K_BYTES = 64 * MIB
"""The part that cuBLAS takes with its first product if it may split products along K; measured on an H200."""
SAME_AS_H200 = "taken to be that of an H200"
SEEN = "total as torch on Linux names it in public out-of-memory messages (drivers differ by 0.2 GiB or so)"
ASSUMED = "total assumed: the nominal size less what drivers usually keep, not checked"
MEASURED = "total and context measured on one (driver for CUDA 13.0, torch 2.11)"
LEAST_CAPABILITY = (8, 0)
"""The lowest compute capability that kernels run on: the first with bfloat16 in tensor cores."""


class SheetRates(NamedTuple):
    """Rates of one GPU from its data sheet or white paper: dense products, sums in float32.

    GeForce products with float32 sums have half the rate of those with float16 sums. Laptops are at their boost clock.
    """

    gigabytes: float
    """Memory bandwidth, GB/s."""
    bus_bits: int
    pin_gigabits: float
    """Data rate of a pin of the bus, Gb/s."""
    bfloat16: float
    """TFLOP/s in tensor cores; float16 before Ampere, without tensor cores on Pascal."""
    fp8: float = 0.0
    """TFLOP/s of e4m3; 0: none."""
    has_nvlink: bool = False
    """True if several of them are usually linked, so that each reads the memory of all."""


class Gpu(NamedTuple):
    """One kind of GPU. Nominal sizes are from NVIDIA's data sheets, capabilities from developer.nvidia.com/cuda-gpus."""

    key: str
    """Name that a user types: the model, then form factor and size if there are several."""
    name: str
    """The driver's name."""
    total_bytes: int
    """Bytes that the driver reports: less than the nominal size, since the driver keeps some."""
    context_bytes: int
    source: str
    """Source of the two numbers."""
    capability: tuple[int, int]
    nominal_gb: int
    sheet: SheetRates

    @property
    def is_too_old(self) -> bool:
        return self.capability < LEAST_CAPABILITY


def _read_gpu(row: Mapping[str, Any]) -> Gpu:
    source = MEASURED
    if row["source"] != "measured":
        source = f"{SEEN if row['source'] == 'seen' else ASSUMED}; context {SAME_AS_H200}"
    total_bytes = row.get("total_bytes") or int(row["total_gib"] * GIB)
    numbers = total_bytes, CONTEXT_BYTES, source, (*row["capability"],), row["nominal_gb"]
    return Gpu(row["key"], row["name"], *numbers, SheetRates(**row["sheet"]))


def read_data(name: str) -> Any:  # noqa: ANN401 whatever JSON holds
    """Read a JSON file of the package's data."""
    return json.loads(resources.files("holdfast").joinpath("data", name).read_text(encoding="utf-8"))


_ROWS = read_data("gpus.json")
PLANNED_GPUS: Mapping[str, Gpu] = {row["key"]: _read_gpu(row) for row in _ROWS}
"""Every GPU that can be planned for by name."""
PORTABLE: Mapping[str, Gpu] = {row["key"]: PLANNED_GPUS[row["key"]] for row in _ROWS if row.get("portable")}
"""GPUs of laptops and of the DGX Spark, which are planned for and never advised."""
GPUS: Mapping[str, Gpu] = {key: gpu for key, gpu in PLANNED_GPUS.items() if key not in PORTABLE}
"""GPUs of desktops and servers, the smallest first."""
H200 = GPUS["h200"]
LAPTOP = "laptop"
SHARED_NOTE = (
    "{name} is taken as gb10: its 128 GB are shared with the operating system, for which this plan leaves what it does not "
    "budget; kernels of this version were never run on it (ARM host, compute capability 12.1)"
)
ALIASES: Mapping[str, str] = read_data("gpu_aliases.json")
"""Other names of models, squeezed."""


class NamedGpus(NamedTuple):
    """Meaning of a name such as 2x4090."""

    gpu: Gpu
    num_gpus: int
    note: str | None
    """Names the chosen GPU, if the name leaves the memory open."""


class _Wanted(NamedTuple):
    """Parts of a name; missing ones are empty."""

    model: str
    form: str
    nominal_gb: int


MAX_NAME = 100
"""Most characters of a name."""
MAX_GPUS = 1024
_COUNT_FIRST = re.compile(r"(\d{1,6})\s*[x*\u00d7]\s*(?=[a-z\d])(.+)")
_COUNT_LAST = re.compile(r"(.+?)\s*[x*\u00d7]\s*(\d{1,6})")
_SAYS_NOTHING = re.compile(
    r"nvidia|geforce|tesla|quadro|graphics|generation|server|workstation|edition|blackwell|\bgpus?\b|\bhbm\w*|\bac\b"
)
_SIZE = re.compile(r"(?<![a-z\d])(\d{1,3})[\s_-]*g(?:i?b)?(?![a-z\d])")
_FORM = re.compile(r"(?<![a-z])(sxm|pcie|pci-e|nvl|laptop|mobile|notebook)\d*(?![a-z\d])")
_MOBILE = re.compile(r"(\d{4}(?:ti)?)(?:m|mobile|laptop)")
"""4070m and 4090laptop, squeezed."""


def find_gpu(name: str) -> Gpu:
    """Find a GPU by name, whatever its case, spaces and dashes."""
    return find_gpus(name).gpu


def find_gpus(name: str) -> NamedGpus:
    """Like `find_gpu`, with a number before or after the name: 2x4090, 8 x H100, h100x2 and 4090 x 2.

    A name without a size means the model that has no size in its key, else the largest: a100 has 80 GB.
    """
    read = [_named(*reading) for reading in _counted(name[: MAX_NAME + 1].strip().lower())]
    # rtx4090 and 4090x2 can be read in several ways: the right one leaves a known name.
    num_gpus, wanted, found = next((reading for reading in read if reading[2]), read[0])
    if not found or len(name) > MAX_NAME:
        others = (_other_device(name, reading[1].model) for reading in read)
        raise next((found for found in others if found is not None), None) or _unknown(name, wanted)
    if not 1 <= num_gpus <= MAX_GPUS:
        raise ConfigError("value.out_of_range", name="gpu", value=num_gpus, minimum=1, maximum=MAX_GPUS)
    taken = max(found, key=lambda gpu: (_squeezed(gpu.key) == wanted.model, not _key_of(gpu).form, gpu.nominal_gb))
    if taken.key == "gb10":
        return NamedGpus(taken, num_gpus, SHARED_NOTE.format(name=shown(name)))
    others = {gpu.nominal_gb: gpu.key for gpu in reversed(found) if gpu.nominal_gb != taken.nominal_gb}
    as_key = f"{shown(name)} is taken as {taken.key}, with {taken.nominal_gb} GB"
    return NamedGpus(taken, num_gpus, f"{as_key}; there is {' and '.join(others.values())} too" if others else None)


def _counted(text: str) -> list[tuple[int, str]]:
    """List every reading of a text as a number and a name."""
    first, last = _COUNT_FIRST.fullmatch(text), _COUNT_LAST.fullmatch(text)
    readings = [(1, text)]
    readings += [(int(first[1]), first[2])] if first else []
    readings += [(int(last[2]), last[1])] if last else []
    return readings


def _named(num_gpus: int, text: str) -> tuple[int, _Wanted, list[Gpu]]:
    """Return the parts of a name, and every GPU that it may mean."""
    wanted = _wanted(text)
    return num_gpus, wanted, _meant(wanted) or _meant(_wanted(f"{text}g"))  # h100-80 too


def _wanted(text: str) -> _Wanted:
    """Split a lower-case name into its parts."""
    text = _SAYS_NOTHING.sub(" ", text)
    size = _SIZE.search(text)
    text = _SIZE.sub(" ", text, count=1)
    form = _FORM.search(text)
    model = _squeezed(_FORM.sub(" ", text, count=1))
    word = "" if form is None else form[1].replace("-", "")
    if (mobile := _MOBILE.fullmatch(model)) is not None:
        model, word = mobile[1], LAPTOP
    word = LAPTOP if word in ("mobile", "notebook") else word
    if size is None and (glued := re.fullmatch(r"(\w+(?:ti|00))(\d\d)gi?b?", model)):  # a10080gb, 4060ti16g
        return _Wanted(ALIASES.get(glued[1], glued[1]), word, int(glued[2]))
    return _Wanted(ALIASES.get(model, model), word, 0 if size is None else int(size[1]))


def _squeezed(text: str) -> str:
    """Keep letters and digits, without a leading rtx or gtx."""
    return re.sub(r"^[rg]tx(?=[a-z\d])", "", re.sub(r"[^a-z\d]", "", text))


@cache
def _key_of(gpu: Gpu) -> _Wanted:
    return _wanted(gpu.key)


@cache
def _name_of(gpu: Gpu) -> _Wanted:
    return _wanted(gpu.name.lower())


def _meant(wanted: _Wanted) -> list[Gpu]:
    """List every GPU that a name may mean; a driver's name means one."""
    named = [gpu for gpu in PLANNED_GPUS.values() if wanted == _name_of(gpu)]
    return named or [gpu for gpu in PLANNED_GPUS.values() if _is_meant(gpu, wanted)]


def _is_meant(gpu: Gpu, wanted: _Wanted) -> bool:
    """Match a GPU with a name. The form factor counts if the model has several; the plain one is SXM."""
    key = _key_of(gpu)
    if key.model != wanted.model or wanted.nominal_gb not in (0, gpu.nominal_gb):
        return False
    if LAPTOP in (key.form, wanted.form):
        return key.form == wanted.form
    forms = {_key_of(other).form for other in GPUS.values() if _key_of(other).model == key.model}
    return not wanted.form or forms == {""} or key.form == wanted.form.removeprefix("sxm")


@cache
def _other_kinds() -> tuple[tuple[re.Pattern[str], Mapping[str, str]], ...]:
    return tuple((re.compile(row["names"]), row) for row in read_data("other_devices.json"))


def _other_device(name: str, squeezed: str) -> ConfigError | None:
    """Refuse a device that this version does not run on; None if the name is none of these."""
    row = next((row for names, row in _other_kinds() if names.fullmatch(squeezed)), None)
    if row is None:
        return None
    return ConfigError(
        "device.other_kind", name="gpu", value=name, kind=row["what"], reason=row["reason"], fix=row["fix"]
    )


def _unknown(name: str, wanted: _Wanted) -> ConfigError:
    """Refuse an unknown name with the nearest: the same model in other sizes and forms, then those that begin alike."""
    known = (PORTABLE if wanted.form == LAPTOP else GPUS).values()
    models = {_key_of(gpu).model: None for gpu in known}
    near = difflib.get_close_matches(wanted.model[:MAX_NAME], models, n=4, cutoff=0.7)
    # A common start counts more than a common end, as for h100.
    near.sort(key=lambda model: model[:3] != wanted.model[:3])
    nearest = [gpu.key for model in near for gpu in known if _key_of(gpu).model == model][:3]
    error = ConfigError("device.unknown_gpu", name="gpu", value=name, count=len(PLANNED_GPUS))
    fix = "ass its memory, such as --memory 24GiB."
    return error.hinting(f"Did you mean {' or '.join(nearest)}? Else p{fix}" if nearest else f"P{fix}")


MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")


def available_host_bytes(meminfo: Path = MEMINFO, cgroup: Path = CGROUP) -> int:
    """Return the bytes that can be allocated without swapping."""
    available = named_bytes("MemAvailable", meminfo)
    if available is None:  # not Linux, or an old kernel: the C library knows the total
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    limit, used = _number(cgroup / "memory.max"), _number(cgroup / "memory.current")
    if limit is not None and used is not None:
        reclaimable = _cgroup_file_cache(cgroup / "memory.stat")
        available = min(available, max(0, limit - used + reclaimable))
    return available


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _cgroup_file_cache(stat: Path) -> int:
    try:
        rows = dict(line.split() for line in stat.read_text().splitlines())
        return int(rows.get("inactive_file", 0))
    except (OSError, ValueError):
        return 0
