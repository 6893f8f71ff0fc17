"""Names of models on the Hugging Face Hub: owner/name with a revision, a quantization tag or a file; no torch."""

import re
from dataclasses import dataclass, replace

from holdfast.errors import ConfigError, shown

MAIN = "main"
"""The revision that is meant where none is named."""
LATEST = "latest"
"""What ollama's users write where no tag is meant."""
MAX_NAME = 512
"""Characters of a name that is looked at."""
_SITE = re.compile(r"(?:(?:https?://)?(?:www\.)?(?:hf\.co|huggingface\.co)/|hf://)(?:models/)?", re.IGNORECASE)
_PART = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,95}"
_REVISION = r"[A-Za-z0-9][A-Za-z0-9_.+/-]{0,199}"
_NAME = re.compile(
    rf"(?P<repo>{_PART}/{_PART})"
    rf"(?:/(?:tree|blob|resolve)/(?P<page>[A-Za-z0-9][A-Za-z0-9_.+-]*))?"
    r"(?:/(?P<file>[A-Za-z0-9_][A-Za-z0-9_.+=/-]*\.gguf))?"
    rf"(?P<behind>(?:[:@]{_REVISION}){{0,2}})"
)
_FILE_ENDINGS = (".gguf", ".safetensors", ".bin", ".json", ".pt", ".pth")
_PARTS = re.compile(r"(.+)-[0-9]{5}-(of-[0-9]{5}\.gguf)", re.IGNORECASE)
"""A file that is one part of a model."""
COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class HubName:
    """What a person wrote, taken apart."""

    repo: str
    """owner/name."""
    revision: str | None = None
    """A branch, a tag of the repository or a commit; None: main."""
    tag: str | None = None
    """Of a quantization, such as Q4_K_M."""
    file: str | None = None
    """One GGUF file of the repository."""
    is_explicit: bool = False
    """The Hub was named, so that no path can have been meant."""

    @property
    def label(self) -> str:
        """The model without its owner, as tables call it."""
        name = self.repo.rpartition("/")[2]
        return f"{name}:{self.tag}" if self.tag else name

    @property
    def text(self) -> str:
        """As it may be typed."""
        file, tag = f"/{self.file}" if self.file else "", f":{self.tag}" if self.tag else ""
        return f"{self.repo}{file}{tag}" + (f"@{self.revision}" if self.revision else "")

    @property
    def wanted_revision(self) -> str:
        return self.revision or MAIN

    @property
    def is_gguf(self) -> bool:
        """Whether a GGUF file was asked for, not a folder."""
        return self.tag is not None or self.file is not None

    @property
    def download(self) -> str:
        """A command of the Hub's own client that gets the files that are meant, and of a GGUF repository no others."""
        # The client minds the case, and repositories write tags in either.
        spellings = (self.tag.upper(), self.tag.lower()) if self.tag else ()
        wanted = "".join(f' --include "*{spelling}*.gguf"' for spelling in spellings)
        if self.file:
            parts = _PARTS.fullmatch(self.file)
            wanted = f' --include "{parts[1]}-*-{parts[2]}"' if parts else f" {self.file}"
        return f"hf download {self.repo}{wanted}" + (f" --revision {self.revision}" if self.revision else "")

    def at(self, revision: str | None) -> "HubName":
        """The same at the revision of a setting, which must not contradict the name."""
        if revision is None or revision == self.revision:
            return self
        if self.revision is not None:
            raise ConfigError(
                f"revision={shown(revision)} was asked", f"the model's name says @{self.revision}", "pass one of them"
            )
        if not is_revision(revision):
            raise ConfigError(f"revision={shown(revision)} was asked", "git has no such names", "try main")
        return replace(self, revision=revision)


def parse_hub_name(text: str) -> HubName | None:
    """owner/name, owner/name:TAG, owner/name@REVISION, owner/name/FILE.gguf, each also behind hf.co/; None for what is none."""
    if len(text) > MAX_NAME:
        return None
    site = _SITE.match(text)
    match = _NAME.fullmatch(text[site.end() :].rstrip("/") if site else text)
    if match is None:
        return None
    repo, behind = match["repo"], re.findall(rf"[:@]{_REVISION}", match["behind"])
    marks = [mark[0] for mark in behind]
    if "--" in repo or ".." in text or (not site and repo.endswith(_FILE_ENDINGS)) or len(set(marks)) != len(marks):
        return None
    said = {mark[0]: mark[1:] for mark in behind}
    tag, revision = said.get(":"), said.get("@", match["page"])
    if (tag is not None and "/" in tag) or (revision is not None and not is_revision(revision)):
        return None
    tag = None if tag is None or tag.lower() == LATEST else tag
    return HubName(repo, revision, tag, match["file"], is_explicit=site is not None)


def is_revision(text: str) -> bool:
    """Whether git could have a branch, a tag or a commit of this name; also that it stays inside a folder of refs."""
    sound = re.fullmatch(_REVISION, text) is not None
    return sound and ".." not in text and "//" not in text and not text.endswith(("/", ".", ".lock"))
