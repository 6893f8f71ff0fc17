"""What devices have: GPUs by name with the memory that CUDA reports, and what this host can still give; no torch."""

import difflib
import os
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

from holdfast.errors import ConfigError, shown
from holdfast.memory.other_devices import other_device

MIB = 1024**2
GIB = 1024**3
CONTEXT_BYTES = 757 * MIB
"""CUDA's context, the handles of its libraries and the code of all kernels, once an engine serves: 793.6 MB on an H200."""
SPLIT_K_BYTES = 64 * MIB
"""Of these, what cuBLAS takes with its first product when it has a workspace to split products along K in; measured on an H200."""
SAME_AS_H200 = "taken to be that of an H200"
SEEN = "total as torch on Linux names it in public out-of-memory messages (drivers differ by 0.2 GiB or so)"
ASSUMED = "total assumed: the nominal size less what drivers usually keep, not checked"
LEAST_CAPABILITY = (8, 0)
"""Of a GPU that kernels here run on: bfloat16 in tensor cores came with it."""


class Gpu(NamedTuple):
    """One kind of GPU. Nominal sizes are those of NVIDIA's data sheets, capabilities those of developer.nvidia.com/cuda-gpus."""

    key: str
    """What a person types: the model, its form where there are several, and its size where they differ by it."""
    name: str
    """As its driver says it."""
    total_bytes: int
    """As the driver reports it: less than on the box, since the driver keeps some."""
    context_bytes: int
    source: str
    """Where the two numbers come from."""
    capability: tuple[int, int]
    """CUDA's compute capability, which says what its instructions can do."""
    nominal_gb: int
    """As on the box."""

    @property
    def is_too_old(self) -> bool:
        """Kernels of this version do not run on it."""
        return self.capability < LEAST_CAPABILITY


def _gpu(key: str, name: str, nominal_gb: int, total_gib: float, source: str, capability: tuple[int, int]) -> Gpu:
    source = f"{source}; context {SAME_AS_H200}"
    return Gpu(key, name, int(total_gib * GIB), CONTEXT_BYTES, source, capability, nominal_gb)


def _geforce(key: str, nominal_gb: int, total_gib: float, source: str, capability: tuple[int, int]) -> Gpu:
    """One whose key says its name: rtx4070ti-super-16g is a GeForce RTX 4070 Ti SUPER."""
    model = re.sub(r"-\d+g$", "", key).removeprefix("rtx")
    number, suffix = re.match(r"(\d+)(.*)", model).groups()  # type: ignore[union-attr]
    words = {"": "", "ti": " Ti", "-super": " SUPER", "ti-super": " Ti SUPER"}[suffix]
    return _gpu(key, f"NVIDIA GeForce RTX {number}{words}", nominal_gb, total_gib, source, capability)


H200 = Gpu(
    "h200",
    "NVIDIA H200",
    150_109_880_320,
    CONTEXT_BYTES,
    "total and context measured on one (driver for CUDA 13.0, torch 2.11)",
    (9, 0),
    141,
)
GPUS: Mapping[str, Gpu] = {
    gpu.key: gpu
    for gpu in (
        _geforce("rtx4060ti-8g", 8, 7.62, ASSUMED, (8, 9)),
        _geforce("rtx4060", 8, 7.63, ASSUMED, (8, 9)),
        _geforce("rtx3070", 8, 7.78, SEEN, (8, 6)),
        _geforce("rtx3080", 10, 9.78, SEEN, (8, 6)),
        _gpu("rtx2080ti", "NVIDIA GeForce RTX 2080 Ti", 11, 10.76, SEEN, (7, 5)),
        _geforce("rtx5070", 12, 11.48, ASSUMED, (12, 0)),
        _geforce("rtx4070", 12, 11.72, ASSUMED, (8, 9)),
        _geforce("rtx4070-super", 12, 11.72, ASSUMED, (8, 9)),
        _geforce("rtx4070ti", 12, 11.72, ASSUMED, (8, 9)),
        _geforce("rtx3060", 12, 11.75, SEEN, (8, 6)),
        _geforce("rtx3080-12g", 12, 11.75, ASSUMED, (8, 6)),
        _geforce("rtx3080ti", 12, 11.75, ASSUMED, (8, 6)),
        _gpu("t4", "Tesla T4", 16, 14.75, SEEN, (7, 5)),
        _geforce("rtx5080", 16, 15.47, ASSUMED, (12, 0)),
        _geforce("rtx5060ti-16g", 16, 15.47, ASSUMED, (12, 0)),
        _geforce("rtx5070ti", 16, 15.47, ASSUMED, (12, 0)),
        _geforce("rtx4080", 16, 15.58, ASSUMED, (8, 9)),
        _geforce("rtx4060ti-16g", 16, 15.58, ASSUMED, (8, 9)),
        _geforce("rtx4070ti-super", 16, 15.58, ASSUMED, (8, 9)),
        _geforce("rtx4080-super", 16, 15.58, ASSUMED, (8, 9)),
        _gpu("rtxa4000", "NVIDIA RTX A4000", 16, 15.61, SEEN, (8, 6)),
        _gpu("v100-16g", "Tesla V100-SXM2-16GB", 16, 15.77, ASSUMED, (7, 0)),
        _gpu("p100", "Tesla P100-PCIE-16GB", 16, 15.89, ASSUMED, (6, 0)),
        _gpu("l4", "NVIDIA L4", 24, 22.03, ASSUMED, (8, 9)),
        _gpu("a10", "NVIDIA A10", 24, 22.06, ASSUMED, (8, 6)),
        _gpu("a10g", "NVIDIA A10G", 24, 22.06, ASSUMED, (8, 6)),
        _gpu("p40", "Tesla P40", 24, 22.38, ASSUMED, (6, 1)),
        _geforce("rtx4090", 24, 23.52, SEEN, (8, 9)),
        _gpu("a30", "NVIDIA A30", 24, 23.53, SEEN, (8, 0)),
        _geforce("rtx3090", 24, 23.68, SEEN, (8, 6)),
        _geforce("rtx3090ti", 24, 23.68, ASSUMED, (8, 6)),
        _gpu("rtxa5000", "NVIDIA RTX A5000", 24, 23.68, ASSUMED, (8, 6)),
        _geforce("rtx5090", 32, 31.36, SEEN, (12, 0)),
        _gpu("v100-32g", "Tesla V100-SXM2-32GB", 32, 31.73, ASSUMED, (7, 0)),
        _gpu("a100-40g", "NVIDIA A100-SXM4-40GB", 40, 39.45, SEEN, (8, 0)),
        _gpu("a100-pcie-40g", "NVIDIA A100-PCIE-40GB", 40, 39.45, ASSUMED, (8, 0)),
        _gpu("a40", "NVIDIA A40", 48, 44.35, ASSUMED, (8, 6)),
        _gpu("l40s", "NVIDIA L40S", 48, 44.39, ASSUMED, (8, 9)),
        _gpu("l40", "NVIDIA L40", 48, 44.39, ASSUMED, (8, 9)),
        _gpu("rtxa6000", "NVIDIA RTX A6000", 48, 47.40, ASSUMED, (8, 6)),
        _gpu("rtx6000-ada", "NVIDIA RTX 6000 Ada Generation", 48, 47.40, ASSUMED, (8, 9)),
        _gpu("rtx8000", "Quadro RTX 8000", 48, 47.46, SEEN, (7, 5)),
        _gpu("h100", "NVIDIA H100 80GB HBM3", 80, 79.11, SEEN, (9, 0)),
        _gpu("h100-pcie", "NVIDIA H100 PCIe", 80, 79.11, ASSUMED, (9, 0)),
        _gpu("h800", "NVIDIA H800", 80, 79.11, ASSUMED, (9, 0)),
        _gpu("a100-80g", "NVIDIA A100-SXM4-80GB", 80, 79.14, ASSUMED, (8, 0)),
        _gpu("a100-pcie-80g", "NVIDIA A100 80GB PCIe", 80, 79.14, ASSUMED, (8, 0)),
        _gpu("a800-80g", "NVIDIA A800-SXM4-80GB", 80, 79.14, ASSUMED, (8, 0)),
        _gpu("h100-nvl", "NVIDIA H100 NVL", 94, 93.00, SEEN, (9, 0)),
        _gpu("gh200", "NVIDIA GH200 480GB", 96, 94.50, ASSUMED, (9, 0)),
        _gpu("rtxpro6000", "NVIDIA RTX PRO 6000 Blackwell Server Edition", 96, 94.97, ASSUMED, (12, 0)),
        _gpu("h20", "NVIDIA H20", 96, 95.00, ASSUMED, (9, 0)),
        H200,
        H200._replace(key="h200-nvl", name="NVIDIA H200 NVL", source=f"{ASSUMED}; context {SAME_AS_H200}"),
        _gpu("b200", "NVIDIA B200", 180, 178.35, ASSUMED, (10, 0)),
        _gpu("gb200", "NVIDIA GB200", 186, 184.00, ASSUMED, (10, 0)),
        _gpu("b300", "NVIDIA B300 SXM6 AC", 270, 267.00, ASSUMED, (10, 3)),
        _gpu("gb300", "NVIDIA GB300", 279, 276.00, ASSUMED, (10, 3)),
    )
}
"""Every GPU of a desktop or a server that can be planned for by name, the smallest first."""


def _laptop(model: str, nominal_gb: int, total_gib: float, capability: tuple[int, int]) -> Gpu:
    """A GeForce of a laptop; one of the same number for a desktop has other memory, or another chip."""
    words = model.replace("ti", " Ti")
    name, key = f"NVIDIA GeForce RTX {words} Laptop GPU", f"rtx{model}-laptop"
    if model == "3080":  # sold with two sizes
        key += f"-{nominal_gb}g"
    return _gpu(key, name, nominal_gb, total_gib, ASSUMED, capability)


PORTABLE: Mapping[str, Gpu] = {
    gpu.key: gpu
    for gpu in (
        _laptop("3060", 6, 5.77, (8, 6)),
        _laptop("4050", 6, 5.75, (8, 9)),
        _laptop("3070", 8, 7.66, (8, 6)),
        _laptop("3070ti", 8, 7.66, (8, 6)),
        _laptop("3080", 8, 7.66, (8, 6)),
        _laptop("4060", 8, 7.62, (8, 9)),
        _laptop("4070", 8, 7.62, (8, 9)),
        _laptop("5050", 8, 7.53, (12, 0)),
        _laptop("5060", 8, 7.53, (12, 0)),
        _laptop("5070", 8, 7.53, (12, 0)),
        _laptop("4080", 12, 11.60, (8, 9)),
        _laptop("5070ti", 12, 11.48, (12, 0)),
        _laptop("3080", 16, 15.58, (8, 6)),
        _laptop("3080ti", 16, 15.58, (8, 6)),
        _laptop("4090", 16, 15.58, (8, 9)),
        _laptop("5080", 16, 15.47, (12, 0)),
        _laptop("5090", 24, 23.41, (12, 0)),
        _gpu("gb10", "NVIDIA GB10", 128, 119.6, SEEN, (12, 1)),
    )
}
"""GPUs of laptops and of the DGX Spark, which are planned for and never advised."""
PLANNED_GPUS: Mapping[str, Gpu] = {**GPUS, **PORTABLE}
"""Every GPU that can be planned for by name."""
LAPTOP = "laptop"
SHARED_NOTE = (
    "{name} is taken as gb10: its 128 GB are shared with the operating system, for which this plan leaves what it does not "
    "budget; kernels of this version were never run on it (ARM host, compute capability 12.1)"
)
ALIASES: Mapping[str, str] = {
    "4080s": "4080super",
    "4070s": "4070super",
    "4070tis": "4070tisuper",
    "6000adalovelace": "6000ada",
    "a6000ada": "6000ada",
    "ada6000": "6000ada",
    "pro6000se": "pro6000",
    "pro6000maxq": "pro6000",
    "gh200480": "gh200",
    **dict.fromkeys(("dgxspark", "spark", "dgxsparkgb10", "gb10superchip", "ascentgx10", "digits"), "gb10"),
}
"""Other names of models, squeezed."""


class NamedGpus(NamedTuple):
    """What a name such as 2x4090 asks for."""

    gpu: Gpu
    num_gpus: int
    note: str | None
    """Which one was taken where the name leaves the memory open, in words; else None."""


class _Wanted(NamedTuple):
    """A name in its parts; what was not said is empty."""

    model: str
    form: str
    nominal_gb: int


MAX_NAME = 100
"""Characters of a name; a longer one names nothing."""
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
    """The GPU of that name, in any spelling of case, spaces and dashes."""
    return find_gpus(name).gpu


def find_gpus(name: str) -> NamedGpus:
    """The same with a number before or behind it, as in 2x4090, 8 x H100, h100x2 and 4090 x 2.

    A name that leaves the size open takes the model that has no size in its key, else the largest: a100 is one with 80 GB.
    """
    read = [_named(*reading) for reading in _counted(name[: MAX_NAME + 1].strip().lower())]
    # rtx4090 and 4090x2 may be read in several ways: the right one leaves a name.
    num_gpus, wanted, found = next((reading for reading in read if reading[2]), read[0])
    if not found or len(name) > MAX_NAME:
        others = (other_device(name, reading[1].model) for reading in read)
        raise next((found for found in others if found is not None), None) or _unknown(name, wanted)
    if not 1 <= num_gpus <= MAX_GPUS:
        raise ConfigError(
            f"{num_gpus} GPUs were asked", f"a number from 1 to {MAX_GPUS} works", f"try 2x{found[0].key}"
        )
    taken = max(found, key=lambda gpu: (_squeezed(gpu.key) == wanted.model, not _key_of(gpu).form, gpu.nominal_gb))
    if taken.key == "gb10":
        return NamedGpus(taken, num_gpus, SHARED_NOTE.format(name=shown(name)))
    others = {gpu.nominal_gb: gpu.key for gpu in reversed(found) if gpu.nominal_gb != taken.nominal_gb}
    return NamedGpus(taken, num_gpus, _which(name, taken, list(others.values())) if others else None)


def _which(name: str, taken: Gpu, others: list[str]) -> str:
    return f"{shown(name)} is taken as {taken.key}, with {taken.nominal_gb} GB; there is {' and '.join(others)} too"


def _counted(text: str) -> list[tuple[int, str]]:
    """How many, and of what, in every way that a text may be read."""
    first, last = _COUNT_FIRST.fullmatch(text), _COUNT_LAST.fullmatch(text)
    readings = [(1, text)]
    readings += [(int(first[1]), first[2])] if first else []
    readings += [(int(last[2]), last[1])] if last else []
    return readings


def _named(num_gpus: int, text: str) -> tuple[int, _Wanted, list[Gpu]]:
    """A name in its parts, and every GPU that it may mean."""
    wanted = _wanted(text)
    return num_gpus, wanted, _meant(wanted) or _meant(_wanted(f"{text}g"))  # h100-80 too


def _wanted(text: str) -> _Wanted:
    """A name in small letters, in its parts."""
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
    """Letters and digits, without the word that all cards of a kind begin with."""
    return re.sub(r"^[rg]tx(?=[a-z\d])", "", re.sub(r"[^a-z\d]", "", text))


@cache
def _key_of(gpu: Gpu) -> _Wanted:
    return _wanted(gpu.key)


@cache
def _name_of(gpu: Gpu) -> _Wanted:
    return _wanted(gpu.name.lower())


def _meant(wanted: _Wanted) -> list[Gpu]:
    """Every GPU that a name may mean; what a driver says means one."""
    named = [gpu for gpu in PLANNED_GPUS.values() if wanted == _name_of(gpu)]
    return named or [gpu for gpu in PLANNED_GPUS.values() if _is_meant(gpu, wanted)]


def _is_meant(gpu: Gpu, wanted: _Wanted) -> bool:
    """Whether a GPU is what a name says; a form is heard where the model has several, and the plain one is SXM."""
    key = _key_of(gpu)
    if key.model != wanted.model or wanted.nominal_gb not in (0, gpu.nominal_gb):
        return False
    if LAPTOP in (key.form, wanted.form):
        return key.form == wanted.form
    forms = {_key_of(other).form for other in GPUS.values() if _key_of(other).model == key.model}
    return not wanted.form or forms == {""} or key.form == wanted.form.removeprefix("sxm")


def _unknown(name: str, wanted: _Wanted) -> ConfigError:
    """The error, with the nearest names: the same model in other sizes and forms, then those that begin alike."""
    known = (PORTABLE if wanted.form == LAPTOP else GPUS).values()
    models = {_key_of(gpu).model: None for gpu in known}
    do = "pass its memory, such as --memory 24GiB"
    near = difflib.get_close_matches(wanted.model[:MAX_NAME], models, n=4, cutoff=0.7)
    # One that starts alike, as h100 does, is nearer than one that ends alike.
    near.sort(key=lambda model: model[:3] != wanted.model[:3])
    nearest = [gpu.key for model in near for gpu in known if _key_of(gpu).model == model][:3]
    return ConfigError(
        f"gpu={shown(name)} was asked",
        f"it is none of the {len(PLANNED_GPUS)} GPUs known by name, which holdfast plan --list shows",
        f"did you mean {' or '.join(nearest)}? Else {do}" if nearest else do,
    )


MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")


def available_host_bytes(meminfo: Path = MEMINFO, cgroup: Path = CGROUP) -> int:
    """Bytes that can be taken without pushing anybody out."""
    available = _meminfo_available(meminfo)
    limit, used = _number(cgroup / "memory.max"), _number(cgroup / "memory.current")
    if limit is not None and used is not None:
        reclaimable = _cgroup_file_cache(cgroup / "memory.stat")
        available = min(available, max(0, limit - used + reclaimable))
    return available


def _meminfo_available(meminfo: Path) -> int:
    try:
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass  # Not Linux, or an old kernel: ask the C library instead.
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


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
