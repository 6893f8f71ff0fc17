"""Patterns of module names in a checkpoint's settings: names, and the regular expressions among them that are plain enough; no torch.

They come from files that nobody vouches for, and an expression can be made to run for ever. So those are followed that
consist of names, dots (each stands for itself), ".*", groups of alternatives, and "^" and "$" at the ends; of others it is
known that they are not.
"""

import re
from functools import lru_cache

from holdfast.quant.weight_recipe import REGEX_PREFIX

MAX_WAYS = 64
"""Expressions without alternatives that one with them may stand for."""
_GROUP = re.compile(r"\((?:\?:)?([^()]*)\)(?![*+?{])")
_ANYTHING = re.compile(r"(?<!\\)\.\*")
_NAME = re.compile(r"(?:[\w.-]|\\\.)*")


def matches(pattern: str, module: str) -> bool:
    """Names match as wholes, or as some of the components in a row; expressions from the beginning of a name on."""
    if not pattern.startswith(REGEX_PREFIX):
        return f".{pattern}." in f".{module}."
    return any(_follows(pieces, module, is_whole) for pieces, is_whole in _ways(pattern) or ())


def is_followed(pattern: str) -> bool:
    """Whether it is known what a pattern matches."""
    return not pattern.startswith(REGEX_PREFIX) or _ways(pattern) is not None


@lru_cache(maxsize=256)
def _ways(pattern: str) -> tuple[tuple[tuple[str, ...], bool], ...] | None:
    """Every way to match: names with anything between them, and whether the last one ends it; None: not followed."""
    whole, ways = [pattern.removeprefix(REGEX_PREFIX)], []
    while whole:
        text = whole.pop()
        group = _GROUP.search(text)
        options = group[1].split("|") if group else text.split("|")
        if group or len(options) > 1:
            before, behind = (text[: group.start()], text[group.end() :]) if group else ("", "")
            whole += [before + option + behind for option in options]
        else:
            ways.append(_pieces(text))
        if len(whole) + len(ways) > MAX_WAYS or None in ways:
            return None
    return tuple(way for way in ways if way is not None)


def _pieces(text: str) -> tuple[tuple[str, ...], bool] | None:
    text = text.removeprefix("^")
    is_whole = text.endswith("$")
    pieces = _ANYTHING.split(text.removesuffix("$"))
    if not all(map(_NAME.fullmatch, pieces)):
        return None
    return tuple(piece.replace("\\.", ".") for piece in pieces), is_whole


def _follows(pieces: tuple[str, ...], module: str, is_whole: bool) -> bool:
    """Whether the module begins with the first piece and has the others behind it, the last one at its end if need be."""
    first, *others = pieces
    if not module.startswith(first):
        return False
    place = len(first)
    for piece in others[:-1]:
        found = module.find(piece, place)
        if found < 0:
            return False
        place = found + len(piece)
    if not others:
        return not is_whole or place == len(module)
    last = others[-1]
    return module.find(last, place) >= 0 if not is_whole else module.endswith(last) and len(module) - len(last) >= place
