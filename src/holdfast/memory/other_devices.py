"""Devices that people name and this version does not run on: what is true of each kind, and what to do instead; no torch."""

import re
from typing import NamedTuple

from holdfast.errors import ConfigError, shown


class _Kind(NamedTuple):
    """Names of one kind, squeezed to small letters and digits."""

    names: re.Pattern[str]
    what: str
    has: str
    do: str


NVIDIA = "kernels need an NVIDIA GPU of compute capability 8.0 or more"
NAME_ONE = "name an NVIDIA GPU, which holdfast plan --list shows, or run on the CPU"
KINDS = (
    _Kind(
        re.compile(r"(the)?cpu(only)?|no(ne|gpu)?"),
        "no GPU",
        "a plan without --gpu is for the CPU of a machine that has no GPU",
        "leave --gpu out",
    ),
    _Kind(
        re.compile(
            r"(amd)?(radeon)?(instinct)?(mi\d{2,3}[a-z]?|rx\d{3,4}(xtx?|gre)?|[5-9]\d{3}(xtx?|gre)|(radeon)?(pro)?w\d{4}|radeon\w*|amd\w*"
            r"|strixhalo|(amd)?ryzen\w*|80[56]0s)"
        ),
        "an AMD GPU",
        f"AMD GPUs are not supported: {NVIDIA}",
        NAME_ONE,
    ),
    _Kind(
        re.compile(
            r"apple\w*|(apple)?m[1-9](pro|max|ultra)?(gpu)?|i?mac(book|mini|studio|pro|air)*(m[1-9])?(pro|max|ultra)?"
        ),
        "an Apple chip",
        f"Apple GPUs are not supported: there is no Metal here, and {NVIDIA}",
        "leave --gpu out on that machine for a plan of its CPU; for its GPU use llama.cpp or MLX",
    ),
    _Kind(
        re.compile(r"intel\w*|arc\w*|gaudi\d?|[ab](310|380|50|60|550|570|580|750|770)m?|datacentergpu\w*|max1[15]\d0"),
        "an Intel GPU",
        f"Intel GPUs are not supported: {NVIDIA}",
        NAME_ONE,
    ),
    _Kind(
        re.compile(r"(google)?(cloud)?(tpu\w*|v[2-7][ep]?|trillium|ironwood)"),
        "a TPU",
        f"TPUs are not supported: {NVIDIA}",
        NAME_ONE,
    ),
    _Kind(
        re.compile(r"(aws)?(trainium|inferentia|trn|inf)\d?|ascend\w*|snapdragon\w*|groq\w*|cerebras\w*"),
        "an accelerator without CUDA",
        f"it is not supported: {NVIDIA}",
        NAME_ONE,
    ),
    _Kind(
        re.compile(r"jetson\w*|(agx|nx|nano)?(orin|xavier|thor)(agx|nx|nano|super)*|t[45]000"),
        "a Jetson module",
        "it has CUDA, shares its memory with its operating system, and this version was never tried on one",
        "plan for what its operating system leaves, such as --memory 48GiB for one with 64 GB",
    ),
)


def other_device(name: str, squeezed: str) -> ConfigError | None:
    """The refusal of a device of another kind; None if the name is of none that is known."""
    kind = next((kind for kind in KINDS if kind.names.fullmatch(squeezed)), None)
    return None if kind is None else ConfigError(f"gpu={shown(name)} is {kind.what}", kind.has, kind.do)
