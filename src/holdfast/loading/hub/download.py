"""Downloads from the Hugging Face Hub with its own client: only needed files, counted, with disk space checked first; no torch.

The client, huggingface_hub, is an extra. It is imported only here, when a file has to be fetched. It resumes broken
downloads and skips files that an earlier download has finished.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar
from urllib.parse import urlsplit

from holdfast.errors import ModelError, ModelNotFoundError, UnsupportedModelError
from holdfast.loading.hub.cache import cache_folder, is_offline, read_snapshot, repo_folder, write_ref
from holdfast.loading.hub.choose import (
    choose_gguf,
    gguf_models,
    preferred_tag,
    refuse_without_weights,
    settings_files,
    takes_gguf,
    weight_files,
)
from holdfast.loading.hub.names import HubName
from holdfast.loading.sources.files import CONFIG_FILE
from holdfast.loading.sources.safetensors import INDEX_FILE, SINGLE_FILE, read_index
from holdfast.memory.sizes import format_bytes
from holdfast.observability.log import get_logger

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo, RepoSibling

log = get_logger(__name__)
Answer = TypeVar("Answer")
CLIENT = "huggingface_hub"
INSTALL = "pip install huggingface_hub"
SITE = "https://huggingface.co"
PATIENCE_SECONDS = 10.0
"""Timeout for the list of a repository's files."""
SHORT_PATIENCE_SECONDS = 3.0
"""Timeout for a plan, which should answer at once."""
NUM_WORKERS = 8
SECONDS_BETWEEN_LOOKS = 0.1
SECONDS_TO_STOP = 2.0
_LEFTOVER = re.compile(r"\.[0-9a-f]{8}\.incomplete")
"""End of a partial file that no later download resumes."""


class Download(NamedTuple):
    """Files that are about to be fetched, and their size in all."""

    name: str
    num_files: int
    num_bytes: int
    folder: Path

    @property
    def summary(self) -> str:
        """One line for the log."""
        files = "1 file" if self.num_files == 1 else f"{self.num_files} files"
        return f"{self.name}: {files}, {format_bytes(self.num_bytes)}, into {self.folder}"


Watch = Callable[[Download], AbstractContextManager[Callable[[int], None]]]
"""Shows a download: its context yields a function that is called repeatedly with the bytes on disk."""
CheckConfig = Callable[[Path], object]
"""Raises if the config.json in a folder is unsupported, before weights are fetched."""


def unwatched(download: Download) -> AbstractContextManager[Callable[[int], None]]:
    """Show nothing; the log has one line."""
    return nullcontext(lambda num_bytes: None)


def why_not() -> str | None:
    """Return why downloads are impossible; None if they are possible."""
    if is_offline():
        return "HF_HUB_OFFLINE forbids the network"
    if importlib.util.find_spec(CLIENT) is None:
        return f"the package {CLIENT}, which would download it, is not installed"
    return None


class HubFile(NamedTuple):
    """A file of a repository as the Hub lists it; `blob` is its name in the cache's folder of blobs."""

    name: str
    num_bytes: int
    blob: str


def fetch_config(name: HubName) -> Path:
    """Fetch a snapshot with a config.json and nothing else, for a plan."""
    if not _answers():  # importing the client takes longer than a plan
        raise hub_error(name, ConnectionError())
    with _quiet_client():
        repo = Repository(name, SHORT_PATIENCE_SECONDS)
        if CONFIG_FILE not in repo.files:
            error = ModelNotFoundError("hub.no_config", model=name.text)
            if models := gguf_models(repo.files):
                get = replace(name, tag=preferred_tag(models) or None).download
                error.hinting(f"It has only GGUF files: download one with {get}.")
            raise error
        folder = repo.fetch((CONFIG_FILE,), unwatched)
        repo.note()
        return folder


def fetch_tokenizer(name: HubName, watch: Watch) -> Path:
    """Fetch a snapshot with a tokenizer and nothing else."""
    with _quiet_client():
        repo = Repository(name)
        folder = repo.fetch(tuple(file for file in settings_files(repo.files) if file != CONFIG_FILE), watch)
        repo.note()
        return folder


def fetch_model(name: HubName, load_format: str, watch: Watch, check_config: CheckConfig) -> Path:
    """Fetch all files of a model; return the snapshot's folder, or the first GGUF file in it."""
    with _quiet_client():
        repo = Repository(name)
        if takes_gguf(name, repo.files, load_format):
            choice = choose_gguf(name, gguf_models(repo.files), "the Hub")
            model, others = choice.model, choice.others
            if not model.is_whole:
                have, count = len(model.files), model.num_parts
                raise ModelNotFoundError("hub.missing_parts", model=name.text, have=have, count=count)
            if others:
                log.warning("%s: using %s; %s also has %s", name.text, model.tag, name.repo, ", ".join(others))
            path = repo.fetch(model.files, watch) / model.files[0]
        else:
            path = _fetch_folder(repo, load_format, watch, check_config)
        repo.note()
        return path


def _fetch_folder(repo: Repository, load_format: str, watch: Watch, check_config: CheckConfig) -> Path:
    """Fetch settings and index first: they decide if the model is supported and which weights it has."""
    is_dummy = load_format == "dummy"
    if not is_dummy:
        refuse_without_weights(repo.name, repo.files)
    needs_index = not is_dummy and SINGLE_FILE not in repo.files and INDEX_FILE in repo.files
    folder = repo.fetch((CONFIG_FILE, *((INDEX_FILE,) if needs_index else ())), unwatched)
    check_config(folder)
    shards = sorted(set(read_index(folder).values())) if needs_index else []
    weights = () if is_dummy else weight_files(repo.files, shards)
    return repo.fetch((*settings_files(repo.files), *weights), watch)


class Repository:
    """One commit of a repository on the Hub, with the files that it lists."""

    def __init__(self, name: HubName, patience_seconds: float = PATIENCE_SECONDS) -> None:
        import huggingface_hub

        self.name = name
        self._hub = huggingface_hub
        self._endpoint = os.environ.get("HF_ENDPOINT") or None
        api = huggingface_hub.HfApi(endpoint=self._endpoint)
        options = {"revision": name.wanted_revision, "files_metadata": True, "timeout": patience_seconds}
        try:
            info: ModelInfo = _bounded(lambda: api.model_info(name.repo, **options), 2 * patience_seconds)
        except Exception as error:
            raise hub_error(name, error) from error
        assert info.sha is not None, f"the Hub lists {name.repo} without a commit"
        self.commit: str = info.sha
        self.files: Mapping[str, HubFile] = {file.name: file for file in map(_file, info.siblings or ())}
        _refuse_gguf_architecture(name, getattr(info, "gguf", None), self.files)

    def fetch(self, names: Sequence[str], watch: Watch) -> Path:
        """Fetch the files that are not cached yet; return the folder of the snapshot."""
        missing = next((name for name in names if name not in self.files), None)
        if missing is not None:
            raise ModelNotFoundError("hub.missing_file", model=self.name.text, file=missing)
        storage = repo_folder(self.name.repo)
        folder = storage / "snapshots" / self.commit
        wanted = [self.files[name] for name in names if not (folder / name).is_file()]
        if wanted:
            download = Download(self.name.text, len(wanted), sum(file.num_bytes for file in wanted), cache_folder())
            check_space(download, wanted, storage)
            log.info("downloading %s", download.summary)
            with watch(download) as show:
                self.fetch_all(wanted, storage, show)
        absent = [name for name in names if name not in read_snapshot(folder).files] if folder.is_dir() else list(names)
        if absent:
            raise ModelNotFoundError("hub.not_downloaded", model=self.name.text, file=absent[0], folder=folder)
        return folder

    def note(self) -> None:
        """Record that the revision is this commit, once all files are cached."""
        write_ref(self.name.repo, self.name.wanted_revision, self.commit)

    def fetch_all(self, files: Sequence[HubFile], storage: Path, show: Callable[[int], None]) -> None:
        """Fetch several at a time, in daemon threads; remove the partial files of those that hang."""
        stop, errors = threading.Event(), list[BaseException]()
        waiting = iter(files)
        lock = threading.Lock()

        def work(ended: threading.Event) -> None:
            try:
                while not stop.is_set():
                    with lock:
                        file = next(waiting, None)
                    if file is None:
                        return
                    self.fetch_one(file.name, stop)
            except BaseException as error:
                errors.append(error)
                stop.set()
            finally:
                ended.set()

        before = set(_partial_files(storage))
        # Not Thread.join: after Ctrl-C, Python 3.11 takes the thread for one that has ended.
        ends = [threading.Event() for _ in files[:NUM_WORKERS]]
        threads = [threading.Thread(target=work, args=(ended,), daemon=True) for ended in ends]
        started: list[threading.Event] = []
        try:
            for thread, ended in zip(threads, ends, strict=True):
                thread.start()
                started.append(ended)
            while working := [ended for ended in ends if not ended.is_set()]:
                working[0].wait(SECONDS_BETWEEN_LOOKS)
                show(sum(bytes_there(file, storage) for file in files))
        finally:
            stop.set()
            hanging = True  # a second Ctrl-C does not wait
            try:
                last_moment = time.monotonic() + SECONDS_TO_STOP
                hanging = not all(ended.wait(max(last_moment - time.monotonic(), 0.0)) for ended in started)
            finally:
                # A download that ended by itself has put its partial file away; one that hangs ends with the process.
                for partial in set(_partial_files(storage)) - before if hanging else ():
                    if _LEFTOVER.search(partial.name):
                        partial.unlink(missing_ok=True)
        if errors:
            first = next((error for error in errors if not isinstance(error, StoppedError)), errors[0])
            raise hub_error(self.name, first) from first

    def fetch_one(self, file: str, stop: threading.Event) -> None:
        """Fetch one file into the cache."""
        import inspect

        options: dict[str, object] = {
            "revision": self.commit,
            "cache_dir": str(cache_folder()),
            "endpoint": self._endpoint,
        }
        if "tqdm_class" in inspect.signature(self._hub.hf_hub_download).parameters:  # older clients draw their own bars
            options["tqdm_class"] = _silent_bar(stop)
        self._hub.hf_hub_download(self.name.repo, file, **options)  # type: ignore[arg-type]


class StoppedError(Exception):
    """Another file failed, or the user pressed Ctrl-C."""


def _silent_bar(stop: threading.Event) -> type:
    """Return a bar of the client's kind that draws nothing, and ends the download of its file when `stop` is set."""
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

    class SilentBar(tqdm):  # type: ignore[misc]
        def __init__(self, *args: object, **options: object) -> None:
            super().__init__(*args, **(options | {"disable": True}))

        def update(self, n: float | None = 1) -> bool | None:
            if stop.is_set():
                raise StoppedError
            return super().update(n)

    return SilentBar


@contextmanager
def _quiet_client() -> Iterator[None]:
    """Mute the client's own bars and log lines: an error is reported once, in one line."""
    from huggingface_hub.utils import (  # type: ignore[attr-defined]
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
        logging,
    )

    # If the variable is set, the client warns about a change.
    is_settled = os.environ.get("HF_HUB_DISABLE_PROGRESS_BARS") is not None
    level, had_bars = logging.get_verbosity(), not is_settled and not are_progress_bars_disabled()
    logging.set_verbosity_error()
    if had_bars:
        disable_progress_bars()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if had_bars:
            enable_progress_bars()


def _bounded(request: Callable[[], Answer], seconds: float) -> Answer:
    """Run a request with a time limit; it may hang where no timeout applies, as in DNS resolution."""
    answers: list[Answer] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            answers.append(request())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not answers:
        raise TimeoutError(f"no answer in {seconds:.0f} s")
    return answers[0]


def _file(sibling: RepoSibling) -> HubFile:
    blob = sibling.blob_id if sibling.lfs is None else sibling.lfs.sha256
    return HubFile(sibling.rfilename, sibling.size or 0, blob or "")


def _partial_files(storage: Path) -> list[Path]:
    return list((storage / "blobs").glob("*.incomplete"))


def bytes_there(file: HubFile, storage: Path) -> int:
    """Return the bytes of a file that are on disk, whole or in part."""
    if not file.blob:
        return 0
    try:
        return (storage / "blobs" / file.blob).stat().st_size
    except OSError:
        pass
    sizes = [0]
    for path in (storage / "blobs").glob(f"{file.blob}*.incomplete"):
        try:
            status = path.stat()
        except OSError:
            continue  # another process has just finished it
        sizes.append(min(status.st_size, status.st_blocks * 512))
    return max(sizes)


def check_space(download: Download, files: Sequence[HubFile], storage: Path) -> None:
    """Refuse a download that would fill the disk, before the first byte."""
    whole = [file for file in files if (storage / "blobs" / file.blob).is_file()] if storage.is_dir() else []
    needed = download.num_bytes - sum(file.num_bytes for file in whole)
    place = next((path for path in (download.folder, *download.folder.absolute().parents) if path.is_dir()), Path("/"))
    try:
        free = shutil.disk_usage(place).free
    except OSError:
        return
    if needed > free:
        sizes = {"needed": format_bytes(needed), "free": format_bytes(free)}
        raise ModelNotFoundError("hub.no_space", model=download.name, folder=download.folder, **sizes)


def _refuse_gguf_architecture(name: HubName, gguf: object, files: Collection[str]) -> None:
    """Refuse an unsupported architecture before fetching: the Hub knows that of most GGUF files."""
    from holdfast.loading.gguf.config import ARCHITECTURES, refuse_architecture

    arch = gguf.get("architecture") if isinstance(gguf, dict) else None
    if isinstance(arch, str) and arch not in ARCHITECTURES and takes_gguf(name, files):
        raise refuse_architecture(arch, name.text)


_CODES = json.loads(resources.files("holdfast").joinpath("data", "hub_errors.json").read_text(encoding="utf-8"))
"""Messages by the client's error class (the first match among an error and its causes), then by HTTP status, then by
part of a network error's name."""


def hub_error(name: HubName, error: BaseException) -> ModelError:
    """Convert an error of the Hub or the network into one line with the fix."""
    if isinstance(error, ModelError):
        return error
    chain = list(_chain(error))
    kinds = {kind.__name__ for one in chain for kind in type(one).__mro__}
    if "LocalEntryNotFoundError" in kinds:
        kinds.discard("EntryNotFoundError")
    statuses = (getattr(getattr(one, "response", None), "status_code", None) for one in chain)
    status = next((status for status in statuses if isinstance(status, int)), None)
    code = next((code for kind, code in _CODES["classes"].items() if kind in kinds), None)
    if code is None and status is not None:
        code = _CODES["statuses"].get(str(status), "hub.http_error")
    if code is None:
        words = (code for word, code in _CODES["words"].items() if any(word in kind for kind in kinds))
        code = next(words, "hub.failed")
    endpoint = os.environ.get("HF_ENDPOINT") or SITE
    reason = " ".join(str(error).split())[:200] or type(error).__name__
    values = {"repo": name.repo, "page": f"{endpoint}/{name.repo}", "endpoint": endpoint, "status": status}
    values |= {"revision": name.wanted_revision, "download": name.download, "reason": reason}
    kind = UnsupportedModelError if code == "hub.gated" else ModelNotFoundError
    return kind(code, model=name.text, **values)


def _answers() -> bool:
    """Return True if a server listens at the Hub's address; with a proxy only the client can find out."""
    from urllib.request import getproxies

    if getproxies():
        return True
    where = urlsplit(os.environ.get("HF_ENDPOINT") or SITE)
    port = where.port or (80 if where.scheme == "http" else 443)

    def connect() -> bool:
        with socket.create_connection((where.hostname, port), SHORT_PATIENCE_SECONDS):
            return True

    try:
        return _bounded(connect, SHORT_PATIENCE_SECONDS)
    except OSError:
        return False


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    for _ in range(16):
        if error is None:
            return
        yield error
        error = error.__cause__ or error.__context__
