"""Keys: the API keys of a server, from options, environment and files; compared in constant time; no torch."""

import hashlib
import hmac
import os
import re
import secrets
import stat
from collections.abc import Iterable
from pathlib import Path

from holdfast.errors import ConfigError

ONE_KEY_VARIABLE = "HOLDFAST_API_KEY"
KEYS_VARIABLE = "HOLDFAST_API_KEYS"
MAX_KEYS = 1024
MAX_KEY_CHARS = 512
MAX_FILE_BYTES = 2**20
KEY = re.compile(r"[!-~]+")
"""Characters of a key: printable ASCII, which headers carry unchanged."""


class Keys:
    """API keys of a server, kept as digests; without keys it is open to every client."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        distinct = dict.fromkeys(keys)
        for key in distinct:
            if not KEY.fullmatch(key) or len(key) > MAX_KEY_CHARS:
                raise ConfigError("http.key_invalid", maximum=MAX_KEY_CHARS)
        if len(distinct) > MAX_KEYS:
            raise ConfigError("http.keys_too_many", maximum=MAX_KEYS, count=len(distinct))
        self._digests = tuple(hashlib.sha256(key.encode()).digest() for key in distinct)
        secret = secrets.token_bytes(32)
        self._salts = tuple(hmac.digest(secret, digest, "sha256").hex()[:32] for digest in self._digests)

    def __len__(self) -> int:
        return len(self._digests)

    def __repr__(self) -> str:
        return f"Keys({len(self)} of them)"

    def find(self, presented: bytes) -> int | None:
        """Return the index of a key. Compares every key, in constant time."""
        digest = hashlib.sha256(presented).digest()
        found: int | None = None
        for index, known in enumerate(self._digests):
            if hmac.compare_digest(digest, known):
                found = index
        return found

    def cache_salt(self, index: int) -> str | None:
        """Return the cache salt of a key: with several keys, each gets prefix hits only on its own prompts.

        Time to first token reveals a prefix hit, and must not reveal another key's prompts.
        """
        return self._salts[index] if len(self) > 1 else None


def collect_keys(given: Iterable[str] = (), file: str | None = None) -> Keys:
    """Collect the keys of options, a file and the environment."""
    keys = list(given)
    if one := os.environ.get(ONE_KEY_VARIABLE, "").strip():
        keys.append(one)
    keys += [key.strip() for key in os.environ.get(KEYS_VARIABLE, "").split(",") if key.strip()]
    if file is not None:
        keys += read_key_file(file)
    return Keys(keys)


def read_key_file(file: str) -> list[str]:
    """Read a key from each line; skips empty lines and those that begin with #."""

    def refused(reason: str) -> ConfigError:
        return ConfigError("http.key_file_unreadable", file=file, reason=reason)

    try:
        with Path(file).expanduser().open("rb") as opened:
            status = os.fstat(opened.fileno())
            if not stat.S_ISREG(status.st_mode) and not stat.S_ISFIFO(status.st_mode):
                raise refused("it is not a file")
            if status.st_mode & stat.S_IROTH:
                raise ConfigError("http.key_file_public", file=file)
            data = opened.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise refused(error.strerror or "reading failed") from error
    if len(data) > MAX_FILE_BYTES:
        raise refused(f"it is larger than {MAX_FILE_BYTES >> 20} MiB")
    try:
        lines = data.decode("ascii").splitlines()
    except UnicodeDecodeError as error:
        raise refused(f"byte {error.start} is not ASCII") from error
    keys = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not keys:
        raise refused("it has no key")
    return keys
