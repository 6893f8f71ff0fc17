"""Downloads from the Hugging Face Hub with its own client: only files that are needed, counted, with room checked first; no torch.

The client, huggingface_hub, is an extra that is imported here and nowhere else, when something has to be fetched. It
resumes where a connection is cut, and does not fetch again what an earlier download has finished.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import ModuleType
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
"""How long the list of a repository's files may take."""
SHORT_PATIENCE_SECONDS = 3.0
"""The same for a plan, which should answer at once."""
NUM_WORKERS = 8
SECONDS_BETWEEN_LOOKS = 0.1
SECONDS_TO_STOP = 2.0
_LEFTOVER = re.compile(r"\.[0-9a-f]{8}\.incomplete")
"""The end of a partial file that no later download takes up again."""


class Download(NamedTuple):
    """What is about to be fetched."""

    name: str
    num_files: int
    num_bytes: int
    """Of all these files."""
    folder: Path

    @property
    def words(self) -> str:
        files = "1 file" if self.num_files == 1 else f"{self.num_files} files"
        return f"{self.name}: {files}, {format_bytes(self.num_bytes)}, into {self.folder}"


Watch = Callable[[Download], AbstractContextManager[Callable[[int], None]]]
"""Shows a download to whoever waits; what it gives is told the bytes that are on disk, again and again."""
CheckConfig = Callable[[Path], object]
"""Raises where the config.json in a folder describes what does not run, before weights are fetched."""


def unwatched(download: Download) -> AbstractContextManager[Callable[[int], None]]:
    """Nobody waits; the log has a line."""
    return nullcontext(lambda num_bytes: None)


def why_not() -> str | None:
    """Why nothing can be downloaded, in words; None where it can."""
    if is_offline():
        return "HF_HUB_OFFLINE forbids the network"
    if importlib.util.find_spec(CLIENT) is None:
        return f"the package {CLIENT}, which would download it, is not installed"
    return None


class _File(NamedTuple):
    """A file of a repository as the Hub lists it."""

    name: str
    num_bytes: int
    blob: str
    """Its name in the cache's folder of blobs."""


def fetch_config(name: HubName) -> Path:
    """A snapshot with a config.json and nothing else, for a plan."""
    if not _answers():  # the client takes longer to import than a plan takes
        raise _unreachable(name)
    with _quiet_client():
        repo = _Repository(name, SHORT_PATIENCE_SECONDS)
        if CONFIG_FILE not in repo.files:
            models = gguf_models(repo.files)
            get = replace(name, tag=preferred_tag(models) or None).download
            raise ModelNotFoundError(
                f"a plan of '{name.text}' was asked for",
                f"the Hub has no {CONFIG_FILE} of it" + (", only GGUF files" if models else ""),
                f"plan the model that it was made from{f', or download it: {get}' if models else ''}",
            )
        folder = repo.fetch((CONFIG_FILE,), unwatched)
        repo.note()
        return folder


def fetch_tokenizer(name: HubName, watch: Watch) -> Path:
    """A snapshot with a tokenizer and nothing else."""
    with _quiet_client():
        repo = _Repository(name)
        folder = repo.fetch(tuple(file for file in settings_files(repo.files) if file != CONFIG_FILE), watch)
        repo.note()
        return folder


def fetch_model(name: HubName, load_format: str, watch: Watch, check_config: CheckConfig) -> Path:
    """The snapshot's folder, or the first GGUF file in it, with all that is needed to open it."""
    with _quiet_client():
        repo = _Repository(name)
        if takes_gguf(name, repo.files, load_format):
            choice = choose_gguf(name, gguf_models(repo.files), "the Hub")
            if not choice.model.is_whole:
                raise ModelNotFoundError(
                    f"model '{name.text}' was asked for",
                    f"the Hub has {len(choice.model.files)} of its {choice.model.num_parts} parts",
                    "name another quantization",
                )
            if choice.others:
                log.warning(
                    "%s: %s is taken; %s has also %s", name.text, choice.model.tag, name.repo, ", ".join(choice.others)
                )
            path = repo.fetch(choice.model.files, watch) / choice.model.files[0]
        else:
            path = _fetch_folder(repo, load_format, watch, check_config)
        repo.note()
        return path


def _fetch_folder(repo: _Repository, load_format: str, watch: Watch, check_config: CheckConfig) -> Path:
    """The few bytes first that say whether the rest is of any use, and what the rest is."""
    is_dummy = load_format == "dummy"
    if not is_dummy:
        refuse_without_weights(repo.name, repo.files)
    needs_index = not is_dummy and SINGLE_FILE not in repo.files and INDEX_FILE in repo.files
    folder = repo.fetch((CONFIG_FILE, *((INDEX_FILE,) if needs_index else ())), unwatched)
    check_config(folder)
    shards = sorted(set(read_index(folder).values())) if needs_index else []
    absent = [shard for shard in shards if shard not in repo.files]
    if absent:
        raise ModelNotFoundError(
            f"model '{repo.name.text}' was asked for",
            f"its index names {len(absent)} files that the Hub does not have, such as {absent[0]}",
            "name another model or revision",
        )
    weights = () if is_dummy else weight_files(repo.files, shards)
    return repo.fetch((*settings_files(repo.files), *weights), watch)


class _Repository:
    """One commit of a repository on the Hub, with the files that it lists."""

    def __init__(self, name: HubName, patience_seconds: float = PATIENCE_SECONDS) -> None:
        import huggingface_hub

        self.name = name
        self._hub = huggingface_hub
        self._endpoint = os.environ.get("HF_ENDPOINT") or None
        api = huggingface_hub.HfApi(endpoint=self._endpoint)

        def ask() -> ModelInfo:
            return api.model_info(
                name.repo, revision=name.wanted_revision, files_metadata=True, timeout=patience_seconds
            )

        try:
            info = _bounded(ask, 2 * patience_seconds)
        except Exception as error:
            raise told(name, error) from error
        assert info.sha is not None, f"the Hub lists {name.repo} without a commit"
        self.commit: str = info.sha
        self.files: Mapping[str, _File] = {file.name: file for file in map(_file, info.siblings or ())}
        _refuse_gguf_architecture(name, getattr(info, "gguf", None), self.files)

    def fetch(self, names: Sequence[str], watch: Watch) -> Path:
        """Make sure that these files are there; the folder of the snapshot."""
        missing = next((name for name in names if name not in self.files), None)
        if missing is not None:
            raise ModelNotFoundError(
                f"model '{self.name.text}' was asked for", f"the Hub has no {missing} of it", "name another model"
            )
        storage = repo_folder(self.name.repo)
        folder = storage / "snapshots" / self.commit
        wanted = [self.files[name] for name in names if not (folder / name).is_file()]
        if wanted:
            download = Download(self.name.text, len(wanted), sum(file.num_bytes for file in wanted), cache_folder())
            _check_room(download, wanted, storage)
            log.info("downloading %s", download.words)
            with watch(download) as tell:
                self._fetch_all(wanted, storage, tell)
        absent = [name for name in names if name not in read_snapshot(folder).files] if folder.is_dir() else list(names)
        if absent:
            raise ModelNotFoundError(
                f"model '{self.name.text}' was downloaded", f"{absent[0]} is not in {folder}", "try again"
            )
        return folder

    def note(self) -> None:
        """The revision is this commit from now on, for whoever asks the cache; not before all of it is there."""
        write_ref(self.name.repo, self.name.wanted_revision, self.commit)

    def _fetch_all(self, files: Sequence[_File], storage: Path, tell: Callable[[int], None]) -> None:
        """Several at a time, in threads that end with the process; what was cut short leaves nothing behind."""
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
                    self._fetch_one(file.name, stop)
            except BaseException as error:
                errors.append(error)
                stop.set()
            finally:
                ended.set()

        before = set(_partial_files(storage))
        # Not Thread.join: interrupted by Ctrl-C, Python 3.11 takes the thread for one that has ended.
        ends = [threading.Event() for _ in files[:NUM_WORKERS]]
        threads = [threading.Thread(target=work, args=(ended,), daemon=True) for ended in ends]
        started: list[threading.Event] = []
        try:
            for thread, ended in zip(threads, ends, strict=True):
                thread.start()
                started.append(ended)
            while working := [ended for ended in ends if not ended.is_set()]:
                working[0].wait(SECONDS_BETWEEN_LOOKS)
                tell(sum(_bytes_there(file, storage) for file in files))
        finally:
            stop.set()
            hanging = True  # whoever presses Ctrl-C again does not wait
            try:
                last_moment = time.monotonic() + SECONDS_TO_STOP
                hanging = not all(ended.wait(max(last_moment - time.monotonic(), 0.0)) for ended in started)
            finally:
                # A download that ended by itself has put its partial file away; one that hangs ends with the process.
                for partial in set(_partial_files(storage)) - before if hanging else ():
                    if _LEFTOVER.search(partial.name):
                        partial.unlink(missing_ok=True)
        if errors:
            first = next((error for error in errors if not isinstance(error, _StoppedError)), errors[0])
            raise told(self.name, first) from first

    def _fetch_one(self, file: str, stop: threading.Event) -> None:
        options: dict[str, object] = {
            "revision": self.commit,
            "cache_dir": str(cache_folder()),
            "endpoint": self._endpoint,
        }
        if _takes_bars(self._hub):
            options["tqdm_class"] = _silent_bar(stop)
        self._hub.hf_hub_download(self.name.repo, file, **options)  # type: ignore[arg-type]


class _StoppedError(Exception):
    """Another file failed, or somebody pressed Ctrl-C."""


def _takes_bars(hub: ModuleType) -> bool:
    """Older clients draw their own."""
    import inspect

    return "tqdm_class" in inspect.signature(hub.hf_hub_download).parameters


def _silent_bar(stop: threading.Event) -> type:
    """A bar of the client's kind that draws nothing, and ends the download of its file when all are to stop."""
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

    class SilentBar(tqdm):  # type: ignore[misc]
        def __init__(self, *args: object, **options: object) -> None:
            super().__init__(*args, **(options | {"disable": True}))

        def update(self, n: float | None = 1) -> bool | None:
            if stop.is_set():
                raise _StoppedError
            return super().update(n)

    return SilentBar


@contextmanager
def _quiet_client() -> Iterator[None]:
    """Its own bars and remarks are held back: what is wrong is told once, in one line."""
    from huggingface_hub.utils import (  # type: ignore[attr-defined]
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
        logging,
    )

    # Where somebody has settled that by a variable, the client warns about a change.
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


def _bounded(ask: Callable[[], Answer], seconds: float) -> Answer:
    """The answer to a question that may hang where no timeout reaches, as in the resolution of a name."""
    answers: list[Answer] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            answers.append(ask())
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


def _file(sibling: RepoSibling) -> _File:
    lfs = getattr(sibling, "lfs", None)
    sha256 = getattr(lfs, "sha256", None) or (lfs.get("sha256") if isinstance(lfs, dict) else None)
    return _File(
        sibling.rfilename, getattr(sibling, "size", None) or 0, sha256 or getattr(sibling, "blob_id", None) or ""
    )


def _partial_files(storage: Path) -> list[Path]:
    return list((storage / "blobs").glob("*.incomplete"))


def _bytes_there(file: _File, storage: Path) -> int:
    """Bytes of a file that are on disk, whole or in part."""
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
            continue  # it has just been finished
        sizes.append(min(status.st_size, status.st_blocks * 512))
    return max(sizes)


def _check_room(download: Download, files: Sequence[_File], storage: Path) -> None:
    """Refuse before the first byte what would fill the disk."""
    whole = [file for file in files if (storage / "blobs" / file.blob).is_file()] if storage.is_dir() else []
    needed = download.num_bytes - sum(file.num_bytes for file in whole)
    place = next((path for path in (download.folder, *download.folder.absolute().parents) if path.is_dir()), Path("/"))
    try:
        free = shutil.disk_usage(place).free
    except OSError:
        return
    if needed > free:
        raise ModelNotFoundError(
            f"model '{download.name}' was asked for, of which {format_bytes(needed)} are to be downloaded",
            f"{download.folder} has room for {format_bytes(free)}",
            "make room, or set HF_HUB_CACHE to a folder on a larger disk",
        )


def _refuse_gguf_architecture(name: HubName, gguf: object, files: Collection[str]) -> None:
    """The Hub knows the architecture of most GGUF files, so that one that does not run need not be fetched."""
    from holdfast.loading.gguf.config import ARCHITECTURES, refuse_architecture

    arch = gguf.get("architecture") if isinstance(gguf, dict) else None
    if isinstance(arch, str) and arch not in ARCHITECTURES and takes_gguf(name, files):
        raise refuse_architecture(arch, name.text)


def told(name: HubName, error: BaseException) -> ModelError:
    """What went wrong between here and the Hub, in one line that says what to do."""
    asked, page = f"model '{name.text}' was asked for", f"{os.environ.get('HF_ENDPOINT') or SITE}/{name.repo}"
    kinds = {kind.__name__ for one in _chain(error) for kind in type(one).__mro__}
    status = next((code for one in _chain(error) if (code := _status(one)) is not None), None)
    if isinstance(error, ModelError):
        return error
    if "GatedRepoError" in kinds:
        has = "the Hub gives it only to those who have agreed to its terms"
        return UnsupportedModelError(asked, has, f"agree on {page}, then run hf auth login, or set HF_TOKEN")
    if "RepositoryNotFoundError" in kinds or status == 401:
        has = "the Hub has no such model, or shows it only to those who may see it"
        return ModelNotFoundError(
            asked, has, "check owner and name, and for a private one run hf auth login or set HF_TOKEN"
        )
    if "RevisionNotFoundError" in kinds:
        has = f"{name.repo} has no revision {name.wanted_revision}"
        return ModelNotFoundError(asked, has, f"name a branch, a tag or a commit of {page}/commits/main")
    if "FileMetadataError" in kinds:
        has = f"{page} does not answer as the Hub does"
        return ModelNotFoundError(asked, has, "check HF_ENDPOINT, and proxies on the way")
    if "EntryNotFoundError" in kinds and "LocalEntryNotFoundError" not in kinds:
        return ModelNotFoundError(asked, "the Hub lists a file of it that it does not give", "try again later")
    if status == 403:
        return ModelNotFoundError(
            asked, "the Hub refuses it to this token", f"ask for access on {page}, or set HF_TOKEN"
        )
    if status == 429:
        return ModelNotFoundError(asked, "the Hub answers too many requests", "wait, or run hf auth login for more")
    if status is not None:
        return ModelNotFoundError(asked, f"the Hub answers with HTTP {status}", "try again later")
    where = os.environ.get("HF_ENDPOINT") or SITE
    if any("Timeout" in kind for kind in kinds):
        has = f"{where} does not answer in time"
        return ModelNotFoundError(asked, has, "check the network and try again: what is downloaded stays")
    if any(word in kind for kind in kinds for word in ("Connect", "Proxy", "SSL", "Network")):
        return _unreachable(name)
    if any(word in kind for kind in kinds for word in ("Protocol", "ReadError")):
        has = f"{where} broke the connection off, again and again"
        return ModelNotFoundError(asked, has, "check the network and try again: files that are whole stay")
    reason = " ".join(str(error).split())[:200] or type(error).__name__
    return ModelNotFoundError(asked, f"the download failed: {reason}", "try again: what is downloaded stays")


def _unreachable(name: HubName) -> ModelNotFoundError:
    return ModelNotFoundError(
        f"model '{name.text}' was asked for",
        f"{os.environ.get('HF_ENDPOINT') or SITE} cannot be reached, and the cache does not have it",
        f"check the network, or run {name.download} where there is one",
    )


def _answers() -> bool:
    """Whether anything listens where the Hub should be; behind a proxy the client alone can tell."""
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


def _status(error: BaseException) -> int | None:
    code = getattr(getattr(error, "response", None), "status_code", None)
    return code if isinstance(code, int) else None
