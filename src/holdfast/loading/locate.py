"""Finds the model that a user names: a path, the Hugging Face cache, or the Hub itself; no torch.

A path comes before a name on the Hub. Cached files need no network; missing ones are downloaded if possible. Few modules are
imported here, so that a wrong path is reported at once.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.errors import ModelNotFoundError
from holdfast.loading.hub.names import MAIN, HubName, parse_hub_name

if TYPE_CHECKING:
    from logging import Logger

    from holdfast.loading.hub.cache import Found, Snapshot
    from holdfast.loading.hub.download import CheckConfig, Watch

MAX_PATH = 400


@dataclass(frozen=True, slots=True)
class Located:
    """A folder or a file that exists."""

    path: Path
    label: str = ""
    """Name of the model in tables if its path does not show it; empty for a path."""


def locate_model(
    model: str,
    revision: str | None = None,
    load_format: str = "auto",
    watch: Watch | None = None,
    check_config: CheckConfig | None = None,
) -> Located:
    """Return the path, or the files of a model on the Hub; an error suggests similar names."""
    name, path = _parse(model)
    if path is not None:
        return Located(path)
    if name is None:
        raise _no_such_path(model)
    name = name.at(revision)
    snapshot, found = _look(name, load_format)
    if found is not None and not found.missing:
        return _from_cache(name, found)
    if snapshot is None and not name.is_explicit and (near := _neighbours(model)):
        raise ModelNotFoundError("model.not_here_or_cached", model=_escaped(model), name=name.text).hinting(
            f"Did you mean {near}?"
        )
    from holdfast.loading.hub.download import fetch_model, unwatched, why_not

    reason = why_not()
    if reason is None:
        fetched = fetch_model(name, load_format, watch or unwatched, check_config or (lambda folder: None))
        return Located(fetched, name.label)
    if found is not None and not _essential(found):  # only a tokenizer is missing, which another may replace
        return _from_cache(name, found)
    raise _not_here(name, found, reason)


def locate_config(model: str, revision: str | None = None) -> Located | None:
    """Return the path that a plan reads, without network: a given path, or a cached config.json or GGUF file."""
    name, path = _parse(model)
    if path is not None:
        return Located(path)
    if name is None:
        return None
    from holdfast.loading.hub.cache import find_config, find_snapshot

    name = name.at(revision)
    snapshot = find_snapshot(name)
    found = None if snapshot is None else find_config(snapshot, name)
    return None if found is None else Located(found, name.label)


def fetch_hub_config(model: str, revision: str | None = None) -> Located | None:
    """Like `locate_config`, from the Hub; None if the Hub cannot be used."""
    name = parse_hub_name(model)
    if name is None:
        return None
    from holdfast.loading.hub.download import fetch_config, why_not

    name = name.at(revision)
    return None if why_not() is not None or name.is_gguf else Located(fetch_config(name), name.label)


def locate_tokenizer(tokenizer: str, watch: Watch | None = None) -> Path | None:
    """Return the folder or file of a tokenizer; None if the name is neither a path nor on the Hub."""
    name = parse_hub_name(tokenizer)
    path = None if name is not None and name.is_explicit else existing_path(tokenizer)
    if path is not None or name is None:
        return path
    from holdfast.loading.hub.cache import find_snapshot, find_tokenizer
    from holdfast.loading.hub.download import fetch_tokenizer, unwatched, why_not

    snapshot = find_snapshot(name)
    found = None if snapshot is None else find_tokenizer(snapshot)
    if found is not None and not found.missing:
        return found.path
    reason = why_not()
    if reason is not None:
        raise _not_here(name, found, reason)
    return fetch_tokenizer(name, watch or unwatched)


def refuse_wrong_path(model: str) -> None:
    """Raise if the model is neither a path nor a possible Hub name. Cheap, so callers run it first."""
    if parse_hub_name(model) is None and existing_path(model) is None:
        raise _no_such_path(model)


def existing_path(model: str) -> Path | None:
    """Return the path if it exists; raise if its folder is not readable."""
    try:
        path = Path(model).expanduser()
        return path if model.strip() and path.exists() else None
    except PermissionError as error:
        raise ModelNotFoundError("model.no_permission", model=_escaped(model)) from error
    except (OSError, RuntimeError, ValueError):  # too long, of a user without a home, or no path at all
        return None


def _parse(model: str) -> tuple[HubName | None, Path | None]:
    """Return the name on the Hub and the existing path; log which one is used if there are both."""
    name = parse_hub_name(model)
    path = None if name is not None and name.is_explicit else existing_path(model)
    if path is not None and name is not None:
        from holdfast.loading.hub.cache import repo_folder

        if repo_folder(name.repo).is_dir():
            _log().warning("using the folder %s here; hf.co/%s is the one in the cache", model, name.text)
    return name, path


def _look(name: HubName, load_format: str) -> tuple[Snapshot | None, Found | None]:
    from holdfast.loading.hub.cache import find_files, find_snapshot

    snapshot = find_snapshot(name)
    return snapshot, None if snapshot is None else find_files(snapshot, name, load_format)


def _from_cache(name: HubName, found: Found) -> Located:
    if found.others:
        _log().warning("%s: using %s; the cache also has %s", name.text, found.path.name, ", ".join(found.others))
    _log().info("%s is in the cache: %s", name.text, found.path)
    return Located(found.path, name.label)


def _essential(found: Found) -> list[str]:
    from holdfast.loading.sources.files import TOKENIZER_FILE

    return [file for file in found.missing if file != TOKENIZER_FILE]


def _no_such_path(model: str) -> ModelNotFoundError:
    hint = "Pass a folder in Hugging Face layout, a .gguf file, or owner/name of a model on the Hub."
    if near := _neighbours(model):
        hint = f"Did you mean {near}?"
    elif (owned := _with_owner(model)) is not None:
        hint = f"Did you mean {owned}, which is in the Hugging Face cache?"
    elif (known := _published(model)) is not None:
        hint = f"Did you mean {known}, its name on the Hub?"
    return ModelNotFoundError("model.not_found", model=_escaped(model)).hinting(hint)


def _published(model: str) -> str | None:
    """Return the Hub name of a model, given its short name in the catalogue."""
    from holdfast.models.catalogue import SOURCES, find_model

    try:
        return SOURCES.get(find_model(model)[0]) if model.strip() and "/" not in model else None
    except ModelNotFoundError:
        return None


def _neighbours(model: str) -> str:
    """Return similar names in the same folder; empty if there are none."""
    try:
        path = Path(model).expanduser()
        siblings = [sibling.name for sibling in path.parent.iterdir()] if path.parent.is_dir() else []
    except PermissionError as error:
        raise ModelNotFoundError("model.no_permission", model=_escaped(model)) from error
    except (OSError, RuntimeError, ValueError):
        return ""
    near = difflib.get_close_matches(path.name, siblings, n=3, cutoff=0.6)
    return " or ".join(_escaped(str(path.parent / name)) for name in near)


def _escaped(path: str) -> str:
    """Escape a path for a message. A path is shown longer than other values."""
    return repr(path[:MAX_PATH])[1:-1]


def _with_owner(model: str) -> str | None:
    """Return the owner/name of a cached model, given its name without the owner."""
    if "/" in model or not model.strip():
        return None
    from holdfast.loading.hub.cache import cached_repos

    bare = model.partition("@")[0].partition(":")[0].lower()
    return next((repo for repo in cached_repos() if repo.partition("/")[2].lower() == bare), None)


def _not_here(name: HubName, found: Found | None, reason: str) -> ModelNotFoundError:
    """Return the error for a name on the Hub that is not fully cached, if nothing can be downloaded."""
    from holdfast.loading.hub.cache import cache_folder, cached_repos, known_revisions
    from holdfast.loading.hub.download import INSTALL
    from holdfast.models.settings import listed

    first = f"Run {INSTALL} to have it downloaded" if "installed" in reason else "Unset HF_HUB_OFFLINE"
    hints = [f"{first}, or run {name.download} on a machine with a network."]
    revisions = () if found is not None else known_revisions(name.repo)
    if len(revisions) == 1 and name.revision is None:  # an interrupted download leaves no ref of main
        _, begun = _look(name.at(revisions[0]), "auto")
        if begun is not None and _essential(begun):
            found = begun
    if found is not None:
        state = f"it is half-downloaded, without {listed(found.missing)}"
    elif revisions:
        state = f"revision {name.revision or MAIN} is not there, only {listed(revisions)}"
        hints.insert(0, f"Write {name.repo}@{revisions[0]} for that one.")
    else:
        repos = list(cached_repos())
        near = difflib.get_close_matches(name.repo, repos, n=1, cutoff=0.8)
        state = "its folder has no readable snapshot" if name.repo in repos else "it is neither a path nor cached"
        if near and name.repo not in repos:
            hints.insert(0, f"Did you mean {near[0]}, which is there?")
    error = ModelNotFoundError("hub.not_cached", model=name.text, folder=cache_folder(), state=state, reason=reason)
    return error.hinting(*hints)


def _log() -> Logger:
    from holdfast.observability.log import get_logger  # a plan by name logs nothing, and is faster without

    return get_logger(__name__)
