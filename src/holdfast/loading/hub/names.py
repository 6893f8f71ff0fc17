"""Names of models on the Hugging Face Hub: owner/name with a revision, a quantization tag or a file; no torch."""

import re
from dataclasses import dataclass, replace

from holdfast.errors import ConfigError

MAIN = "main"
LATEST = "latest"
"""ollama's default tag; it means no tag."""
MAX_NAME = 512
_SITE = re.compile(r"(?:(?:https?://)?(?:www\.)?(?:hf\.co|huggingface\.co)/|hf://)(?:models/)?", re.IGNORECASE)
_PART = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,95}"
_REVISION = r"[A-Za-z0-9][A-Za-z0-9_.+/-]{0,199}"
_NAME = re.compile(
    rf"(?P<repo>{_PART}/{_PART})"
    rf"(?:/(?:tree|blob|resolve)/(?P<page>[A-Za-z0-9][A-Za-z0-9_.+-]*))?"
    r"(?:/(?P<file>[A-Za-z0-9_][A-Za-z0-9_.+=/-]*\.gguf))?"
    rf"(?P<suffixes>(?:[:@]{_REVISION}){{0,2}})"
)
_FILE_ENDINGS = (".gguf", ".safetensors", ".bin", ".json", ".pt", ".pth")
_PARTS = re.compile(r"(.+)-[0-9]{5}-(of-[0-9]{5}\.gguf)", re.IGNORECASE)
COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class HubName:
    """A parsed name. `revision` is a branch, a tag of the repository or a commit; `tag` a quantization such as Q4_K_M."""

    repo: str
    revision: str | None = None
    tag: str | None = None
    file: str | None = None
    """One GGUF file of the repository."""
    is_explicit: bool = False
    """True if the name begins with hf.co/ or similar, so it cannot be a path."""

    @property
    def label(self) -> str:
        """The model without its owner, for tables."""
        name = self.repo.rpartition("/")[2]
        return f"{name}:{self.tag}" if self.tag else name

    @property
    def text(self) -> str:
        """The name as a user types it."""
        file, tag = f"/{self.file}" if self.file else "", f":{self.tag}" if self.tag else ""
        return f"{self.repo}{file}{tag}" + (f"@{self.revision}" if self.revision else "")

    @property
    def wanted_revision(self) -> str:
        return self.revision or MAIN

    @property
    def is_gguf(self) -> bool:
        """True if the name means a GGUF file, not a folder."""
        return self.tag is not None or self.file is not None

    @property
    def download(self) -> str:
        """The command of the Hub's own client that gets these files, and of a GGUF repository no others."""
        # The client is case-sensitive, and repositories write tags in either case.
        spellings = (self.tag.upper(), self.tag.lower()) if self.tag else ()
        wanted = "".join(f' --include "*{spelling}*.gguf"' for spelling in spellings)
        if self.file:
            parts = _PARTS.fullmatch(self.file)
            wanted = f' --include "{parts[1]}-*-{parts[2]}"' if parts else f" {self.file}"
        return f"hf download {self.repo}{wanted}" + (f" --revision {self.revision}" if self.revision else "")

    def at(self, revision: str | None) -> "HubName":
        """Return the name with an option's revision, which must not contradict the name's own."""
        if revision is None or revision == self.revision:
            return self
        if self.revision is not None:
            raise ConfigError("hub.revision_twice", name="revision", revision=revision, named=self.revision)
        if not is_revision(revision):
            raise ConfigError("hub.bad_revision", name="revision", revision=revision)
        return replace(self, revision=revision)


def parse_hub_name(text: str) -> HubName | None:
    """Parse owner/name, owner/name:TAG, owner/name@REVISION, owner/name/FILE.gguf, each also after hf.co/; None for others."""
    if len(text) > MAX_NAME:
        return None
    site = _SITE.match(text)
    match = _NAME.fullmatch(text[site.end() :].rstrip("/") if site else text)
    if match is None:
        return None
    repo, suffixes = match["repo"], re.findall(rf"[:@]{_REVISION}", match["suffixes"])
    by_mark = {suffix[0]: suffix[1:] for suffix in suffixes}
    if "--" in repo or ".." in text or (not site and repo.endswith(_FILE_ENDINGS)) or len(by_mark) != len(suffixes):
        return None
    tag, revision = by_mark.get(":"), by_mark.get("@", match["page"])
    if (tag is not None and "/" in tag) or (revision is not None and not is_revision(revision)):
        return None
    tag = None if tag is None or tag.lower() == LATEST else tag
    return HubName(repo, revision, tag, match["file"], is_explicit=site is not None)


def is_revision(text: str) -> bool:
    """Return True if git could have a branch, a tag or a commit of this name, and it stays inside a folder of refs."""
    is_valid = re.fullmatch(_REVISION, text) is not None
    return is_valid and ".." not in text and "//" not in text and not text.endswith(("/", ".", ".lock"))
