"""Where the model is that a person named: a path, the Hugging Face cache, or the Hub itself; no torch.

A path goes before a name on the Hub. What the cache has is taken without the network, and what it lacks is downloaded
where that can be done. Little is imported here, so that a wrong path is told at once.
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
"""Characters of a path that a message repeats."""


@dataclass(frozen=True, slots=True)
class Located:
    """A folder or a file that exists."""

    path: Path
    label: str = ""
    """What tables call the model where its path does not say it; nothing for a path."""


def locate_model(
    model: str,
    revision: str | None = None,
    load_format: str = "auto",
    watch: Watch | None = None,
    check_config: CheckConfig | None = None,
) -> Located:
    """The path that was named, or the files of a model on the Hub; else an error that says what was probably meant."""
    name = parse_hub_name(model)
    path = None if name is not None and name.is_explicit else existing_path(model)
    if path is not None:
        _tell_both(name, model)
        return Located(path)
    if name is None:
        raise _no_such_path(model)
    name = name.at(revision)
    snapshot, found = _look(name, load_format)
    if found is not None and not found.missing:
        return _taken(name, found)
    if snapshot is None and not name.is_explicit and (near := _neighbours(model)):
        raise ModelNotFoundError(
            f"model '{_escaped(model)}' was asked for",
            "there is no such path, and the cache does not have a model of that name",
            f"did you mean {near}? hf.co/{name.text} downloads it",
        )
    from holdfast.loading.hub.download import fetch_model, unwatched, why_not

    reason = why_not()
    if reason is None:
        fetched = fetch_model(name, load_format, watch or unwatched, check_config or (lambda folder: None))
        return Located(fetched, name.label)
    if found is not None and not _essential(found):  # what is left over is a tokenizer, which another may replace
        return _taken(name, found)
    raise _not_here(name, found, reason)


def locate_config(model: str, revision: str | None = None) -> Located | None:
    """What a plan is read from, as far as that is here: a path, or a config.json or a GGUF file in the cache."""
    name = parse_hub_name(model)
    path = None if name is not None and name.is_explicit else existing_path(model)
    if path is not None:
        _tell_both(name, model)
        return Located(path)
    if name is None:
        return None
    from holdfast.loading.hub.cache import find_config, find_snapshot

    name = name.at(revision)
    snapshot = find_snapshot(name)
    found = None if snapshot is None else find_config(snapshot, name)
    return None if found is None else Located(found, name.label)


def fetch_hub_config(model: str, revision: str | None = None) -> Located | None:
    """The same from the Hub; None where nothing can be asked there."""
    name = parse_hub_name(model)
    if name is None:
        return None
    from holdfast.loading.hub.download import fetch_config, why_not

    name = name.at(revision)
    return None if why_not() is not None or name.is_gguf else Located(fetch_config(name), name.label)


def locate_tokenizer(tokenizer: str, watch: Watch | None = None) -> Path | None:
    """The folder or the file of a tokenizer; None for what is neither a path nor a name on the Hub."""
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
    """The error for what is no path and cannot be a name on the Hub; it costs nothing, so that it may come first."""
    if parse_hub_name(model) is None and existing_path(model) is None:
        raise _no_such_path(model)


def existing_path(model: str) -> Path | None:
    """The path, if there is one; what may not be looked at is told."""
    try:
        path = Path(model).expanduser()
        return path if model.strip() and path.exists() else None
    except PermissionError as error:
        raise ModelNotFoundError(
            f"model '{_escaped(model)}' was asked for", "its folder may not be read", "check the permissions"
        ) from error
    except (OSError, RuntimeError, ValueError):  # too long, of a user without a home, or no path at all
        return None


def _look(name: HubName, load_format: str) -> tuple[Snapshot | None, Found | None]:
    from holdfast.loading.hub.cache import find_files, find_snapshot

    snapshot = find_snapshot(name)
    return snapshot, None if snapshot is None else find_files(snapshot, name, load_format)


def _taken(name: HubName, found: Found) -> Located:
    if found.others:
        _log().warning("%s: %s is taken; the cache has also %s", name.text, found.path.name, ", ".join(found.others))
    _log().info("%s is in the cache: %s", name.text, found.path)
    return Located(found.path, name.label)


def _tell_both(name: HubName | None, model: str) -> None:
    """Somebody who names a model and has a folder of that name should know which one is taken."""
    if name is None:
        return
    from holdfast.loading.hub.cache import repo_folder

    if repo_folder(name.repo).is_dir():
        _log().warning("%s is taken from the folder here; hf.co/%s takes the one in the cache", model, name.text)


def _essential(found: Found) -> list[str]:
    from holdfast.loading.hub.choose import TOKENIZER_FILE

    return [file for file in found.missing if file != TOKENIZER_FILE]


def _no_such_path(model: str) -> ModelNotFoundError:
    near = _neighbours(model)
    do = "pass a folder in Hugging Face layout, a .gguf file, or owner/name of a model on the Hub"
    if near:
        do = f"did you mean {near}?"
    elif (owned := _with_owner(model)) is not None:
        do = f"did you mean {owned}, which is in the Hugging Face cache?"
    elif (known := _published(model)) is not None:
        do = f"did you mean {known}, its name on the Hub?"
    return ModelNotFoundError(f"model '{_escaped(model)}' was asked for", "there is no such file or folder", do)


def _published(model: str) -> str | None:
    """The name on the Hub of a model that plans know by a shorter one."""
    from holdfast.models.catalogue import SOURCES, find_model

    try:
        return SOURCES.get(find_model(model)[0]) if model.strip() and "/" not in model else None
    except ModelNotFoundError:
        return None


def _neighbours(model: str) -> str:
    """Paths beside the one that is not there, with names like its own; nothing where there are none."""
    try:
        path = Path(model).expanduser()
        siblings = [sibling.name for sibling in path.parent.iterdir()] if path.parent.is_dir() else []
    except PermissionError as error:
        raise ModelNotFoundError(
            f"model '{_escaped(model)}' was asked for", "its folder may not be read", "check the permissions"
        ) from error
    except (OSError, RuntimeError, ValueError):
        return ""
    near = difflib.get_close_matches(path.name, siblings, n=3, cutoff=0.6)
    return " or ".join(_escaped(str(path.parent / name)) for name in near)


def _with_owner(model: str) -> str | None:
    """The whole name of a model in the cache, for somebody who left out its owner."""
    if "/" in model or not model.strip():
        return None
    from holdfast.loading.hub.cache import cached_repos

    bare = model.partition("@")[0].partition(":")[0].lower()
    return next((repo for repo in cached_repos() if repo.partition("/")[2].lower() == bare), None)


def _not_here(name: HubName, found: Found | None, reason: str) -> ModelNotFoundError:
    """For a name on the Hub whose files are not all here, where nothing can be downloaded."""
    from holdfast.loading.hub.cache import cache_folder, cached_repos, known_revisions
    from holdfast.loading.hub.download import INSTALL
    from holdfast.models.settings import listed

    asked, folder = f"model '{name.text}' was asked for", cache_folder()
    do = f"run {INSTALL} to have it downloaded" if "installed" in reason else "unset HF_HUB_OFFLINE"
    do = f"{do}, or run {name.download} where there is a network"
    if found is not None:
        has = f"{folder} has it half-downloaded, without {listed(found.missing)}, and {reason}"
        return ModelNotFoundError(asked, has, do)
    revisions = known_revisions(name.repo)
    if len(revisions) == 1 and name.revision is None:  # a download that was cut short leaves no mark of what main is
        _, begun = _look(name.at(revisions[0]), "auto")
        if begun is not None and _essential(begun):
            return _not_here(name, begun, reason)
    if revisions:
        has = f"{folder} has no revision {name.revision or MAIN} of it, only {listed(revisions)}, and {reason}"
        return ModelNotFoundError(asked, has, f"write {name.repo}@{revisions[0]}, or {do}")
    repos = list(cached_repos())
    if name.repo in repos:
        return ModelNotFoundError(
            asked, f"{folder} has its folder, without a snapshot that can be read, and {reason}", do
        )
    near = difflib.get_close_matches(name.repo, repos, n=1, cutoff=0.8)
    meant = f"did you mean {near[0]}, which is there? Else " if near else ""
    return ModelNotFoundError(asked, f"it is neither a path nor in {folder}, and {reason}", f"{meant}{do}")


def _escaped(path: str) -> str:
    return repr(path[:MAX_PATH])[1:-1]


def _log() -> Logger:
    from holdfast.observability.log import get_logger  # a plan by name logs nothing, and comes sooner without

    return get_logger(__name__)
