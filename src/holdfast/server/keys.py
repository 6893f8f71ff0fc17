"""Keys: the API keys of a server, from options, environment and files; compared in constant time; no torch."""

import hashlib
import hmac
import os
import re
import secrets
import stat
from collections.abc import Iterable
from pathlib import Path

from holdfast.errors import ConfigError, shown

ONE_KEY_VARIABLE = "HOLDFAST_API_KEY"
KEYS_VARIABLE = "HOLDFAST_API_KEYS"
MAX_KEYS = 1024
MAX_KEY_CHARS = 512
MAX_FILE_BYTES = 2**20
KEY = re.compile(r"[!-~]+")
"""Printable ASCII: what a header carries as it is."""


class Keys:
    """Keys that open the server; none at all opens it to everybody. Only their digests are kept."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        distinct = dict.fromkeys(keys)
        for key in distinct:
            if not KEY.fullmatch(key) or len(key) > MAX_KEY_CHARS:
                raise ConfigError(
                    "an API key was given",
                    f"it is not one word of 1 to {MAX_KEY_CHARS} printable ASCII characters",
                    "make one, as with openssl rand -hex 32",
                )
        if len(distinct) > MAX_KEYS:
            raise ConfigError(f"{len(distinct)} API keys were given", f"at most {MAX_KEYS} are taken", "give fewer")
        self._digests = tuple(hashlib.sha256(key.encode()).digest() for key in distinct)
        secret = secrets.token_bytes(32)
        self._salts = tuple(hmac.digest(secret, digest, "sha256").hex()[:32] for digest in self._digests)

    def __len__(self) -> int:
        return len(self._digests)

    def __repr__(self) -> str:
        return f"Keys({len(self)} of them)"

    def find(self, presented: bytes) -> int | None:
        """Which key this is. Every key is compared, whatever the others said, and so is a key of any length."""
        digest = hashlib.sha256(presented).digest()
        found: int | None = None
        for index, known in enumerate(self._digests):
            if hmac.compare_digest(digest, known):
                found = index
        return found

    def cache_salt(self, index: int) -> str | None:
        """Whose cached prefixes a request may find: those of its own key, where there are several.

        How soon a first token comes tells whether a prompt was cached. Nobody learns that of another key's prompts.
        """
        return self._salts[index] if len(self) > 1 else None


def collect_keys(given: Iterable[str] = (), file: str | None = None) -> Keys:
    """Keys of options, of a file and of the environment, together."""
    keys = list(given)
    if one := os.environ.get(ONE_KEY_VARIABLE, "").strip():
        keys.append(one)
    keys += [key.strip() for key in os.environ.get(KEYS_VARIABLE, "").split(",") if key.strip()]
    if file is not None:
        keys += read_key_file(file)
    return Keys(keys)


def read_key_file(file: str) -> list[str]:
    """A key on each line; empty lines and those that begin with # are left out."""
    asked = f"API keys of {shown(file)} were asked"
    try:
        with Path(file).expanduser().open("rb") as opened:
            status = os.fstat(opened.fileno())
            if not stat.S_ISREG(status.st_mode) and not stat.S_ISFIFO(status.st_mode):
                raise ConfigError(asked, "it is no file", "name a file with a key on each line")
            if status.st_mode & stat.S_IROTH:
                raise ConfigError(asked, "everybody on this machine may read it", f"run chmod 600 {shown(file)}")
            data = opened.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(asked, error.strerror or "it cannot be read", "check the path and its permissions") from error
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(asked, f"it is larger than {MAX_FILE_BYTES >> 20} MiB", "put a key on each line")
    try:
        lines = data.decode("ascii").splitlines()
    except UnicodeDecodeError as error:
        raise ConfigError(asked, f"byte {error.start} is not ASCII", "put a key on each line") from error
    keys = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not keys:
        raise ConfigError(asked, "there is no key in it", "put a key on each line")
    return keys
