"""The local Hugging Face cache: its folder, the snapshot of a revision, the files of a model in it; no network, no torch.

HF_HUB_CACHE/models--owner--name/refs/main             the commit of a branch or a tag at its last download
                                /snapshots/COMMIT/...  links to
                                /blobs/CHECKSUM        the files themselves
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from holdfast.errors import ModelError, ModelFormatError
from holdfast.loading.hub.choose import (
    choose_gguf,
    gguf_models,
    has_folder_weights,
    settings_files,
    takes_gguf,
    weight_files,
)
from holdfast.loading.hub.names import COMMIT, MAIN, HubName
from holdfast.loading.sources.files import CONFIG_FILE, MANIFEST_FILE, SETTINGS_FILES, TOKENIZER_FILE
from holdfast.loading.sources.safetensors import INDEX_FILE, SINGLE_FILE, read_index

MAX_REF_BYTES = 128
MIN_SHORT_COMMIT = 7
MAX_DEPTH = 4
"""Folders inside a snapshot; repositories of GGUF files have one for each quantization."""
_TRUE = ("1", "on", "yes", "true")
_FOLDER = "models--"


def cache_folder() -> Path:
    """Return the folder of the Hub's client, from the variables that it reads."""
    folder = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    if not folder:
        home = os.environ.get("HF_HOME")
        home = home or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
        folder = os.path.join(home, "hub")
    return Path(os.path.expandvars(os.path.expanduser(folder)))


def is_offline() -> bool:
    """Return True if a variable of the client forbids the network."""
    value = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
    return value.lower() in _TRUE


def repo_folder(repo: str) -> Path:
    """Return the cache's folder of a repository, whether it exists or not."""
    return cache_folder() / f"{_FOLDER}{repo.replace('/', '--')}"


def cached_repos() -> Iterator[str]:
    """List every owner/name in the cache."""
    try:
        names = sorted(entry.name for entry in os.scandir(cache_folder()))
    except OSError:
        return
    for name in names:
        owner, middle, model = name.removeprefix(_FOLDER).partition("--")
        if name.startswith(_FOLDER) and middle and owner and model:
            yield f"{owner}/{model}"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The downloaded files of one commit, and the links whose file is gone."""

    folder: Path
    commit: str
    files: frozenset[str]
    broken: tuple[str, ...]


def find_snapshot(name: HubName) -> Snapshot | None:
    """Return the cached snapshot of a revision, or None."""
    folder = repo_folder(name.repo)
    commit = _commit(folder, name.wanted_revision)
    if commit is None or not (folder / "snapshots" / commit).is_dir():
        return None
    return read_snapshot(folder / "snapshots" / commit)


def read_snapshot(folder: Path) -> Snapshot:
    """List the folder of a snapshot, following links."""
    files: set[str] = set()
    broken: list[str] = []
    for path in _walk(folder, MAX_DEPTH):
        name = path.relative_to(folder).as_posix()
        files.add(name) if path.is_file() else broken.append(name)
    return Snapshot(folder, folder.name, frozenset(files), tuple(sorted(broken)))


def _walk(folder: Path, depth: int) -> Iterator[Path]:
    for entry in os.scandir(folder):
        if not entry.is_symlink() and entry.is_dir():
            if depth > 1:
                yield from _walk(Path(entry.path), depth - 1)
        else:
            yield Path(entry.path)


def known_revisions(repo: str) -> tuple[str, ...]:
    """List the refs with a snapshot in the cache, then the commits without a ref."""
    folder = repo_folder(repo)
    try:
        commits = {path.name for path in (folder / "snapshots").iterdir() if COMMIT.fullmatch(path.name)}
    except OSError:
        return ()
    refs = list(_walk(folder / "refs", MAX_DEPTH)) if (folder / "refs").is_dir() else []
    named = {ref.relative_to(folder / "refs").as_posix(): _read_ref(ref) for ref in refs}
    led_to = {name: commit for name, commit in named.items() if commit in commits}
    return (*sorted(led_to), *sorted(commits - set(led_to.values())))


def _commit(folder: Path, revision: str) -> str | None:
    """Return the commit of a revision at its last download; a short hash works if it is unique."""
    if COMMIT.fullmatch(revision):
        return revision
    commit = _read_ref(folder / "refs" / revision)
    if commit is None and len(revision) >= MIN_SHORT_COMMIT and set(revision) <= set("0123456789abcdef"):
        snapshots = folder / "snapshots"
        known = [path.name for path in snapshots.iterdir()] if snapshots.is_dir() else []
        long = [name for name in known if name.startswith(revision) and COMMIT.fullmatch(name)]
        commit = long[0] if len(long) == 1 else None
    return commit


def _read_ref(path: Path) -> str | None:
    try:
        with open(path, "rb") as file:
            text = file.read(MAX_REF_BYTES).decode("ascii", "replace").strip()
    except OSError:
        return None
    return text if COMMIT.fullmatch(text) else None


@dataclass(frozen=True, slots=True)
class Found:
    """The files of a model in a snapshot: the path to open, and what is still missing."""

    path: Path
    missing: tuple[str, ...] = ()
    """Required files that are absent, or a description if their names are unknown."""
    others: tuple[str, ...] = ()
    """Tags of other quantizations beside it, if the name has none."""


def find_config(snapshot: Snapshot, name: HubName) -> Path | None:
    """Return the path that a plan reads: the folder of a config.json, or a GGUF file."""
    if name.is_gguf or (CONFIG_FILE not in snapshot.files and gguf_models(snapshot.files)):
        found = find_files(snapshot, name, "gguf")
        return None if found.missing else found.path
    return snapshot.folder if CONFIG_FILE in snapshot.files else None


def find_files(snapshot: Snapshot, name: HubName, load_format: str) -> Found:
    """Find the files that opening a model needs, judged from the snapshot alone."""
    names = {*snapshot.files, *snapshot.broken}
    if takes_gguf(name, names, load_format):
        try:
            choice = choose_gguf(name, gguf_models(names), "the cache")
        except ModelError:
            return Found(snapshot.folder, (name.file or f"a GGUF file{f' of {name.tag}' if name.tag else ''}",))
        model = choice.model
        missing = [file for file in model.files if file not in snapshot.files]
        if not model.is_whole:
            missing.append(f"{model.num_parts - len(model.files)} of {model.num_parts} parts of {model.stem}")
        return Found(snapshot.folder / model.files[0], tuple(missing), choice.others)
    needed = {CONFIG_FILE, TOKENIZER_FILE, *settings_files(names)}
    if load_format != "dummy":
        needed |= set(weight_files(names, _shards(snapshot)))
        if not has_folder_weights(snapshot.files) and not needed & {SINGLE_FILE, INDEX_FILE, MANIFEST_FILE}:
            return Found(snapshot.folder, (*sorted(needed - snapshot.files), "the weights"))
    return Found(snapshot.folder, tuple(sorted(needed - snapshot.files)))


def find_tokenizer(snapshot: Snapshot) -> Found:
    """Like `find_files`, for a tokenizer alone."""
    needed = {TOKENIZER_FILE, *(file for file in SETTINGS_FILES if file in snapshot.broken)}
    return Found(snapshot.folder, tuple(sorted(needed - snapshot.files)))


def _shards(snapshot: Snapshot) -> tuple[str, ...]:
    """Return the files of the index; empty if there is no index or it is invalid."""
    if INDEX_FILE not in snapshot.files:
        return ()
    try:
        return tuple(sorted(set(read_index(snapshot.folder).values())))
    except ModelFormatError:
        return ()


def write_ref(repo: str, revision: str, commit: str) -> None:
    """Record the commit of a branch or a tag, once all files are cached."""
    if revision == commit or not COMMIT.fullmatch(commit):
        return
    path = repo_folder(repo) / "refs" / (revision or MAIN)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    partial.write_text(commit, encoding="ascii")
    os.replace(partial, path)
