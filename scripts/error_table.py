"""The table of error codes in docs/errors.md, from src/holdfast/messages/*.toml."""

import tomllib
from pathlib import Path

MESSAGES = Path(__file__).parent.parent / "src" / "holdfast" / "messages"


def error_table(_records: Path) -> str:
    """Return one table per area: codes and messages; a file's first comment introduces its area."""
    parts = []
    for path in sorted(MESSAGES.glob("*.toml")):
        text = path.read_text(encoding="utf-8")
        about = text.partition("\n")[0].removeprefix("#").strip() if text.startswith("#") else ""
        rows = [f"| `{path.stem}.{name}` | {_cell(message)} |" for name, message in tomllib.loads(text).items()]
        parts.append(
            "\n".join(
                [f"### {path.stem}", "", *([about, ""] if about else []), "| code | message |", "|---|---|", *rows]
            )
        )
    return "\n\n".join(parts)


def _cell(message: str) -> str:
    return " ".join(message.split()).replace("|", "\\|").replace("!r}", "}").replace("!l}", "}")
