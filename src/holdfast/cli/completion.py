"""`holdfast completion`: a script for bash, zsh or fish with every command, option and value; no torch.

The script holds all of it, so pressing Tab starts no Python. zsh runs the bash script through its bashcompinit.
"""

from collections.abc import Mapping, Sequence
from importlib import resources
from typing import NamedTuple

from holdfast.cli.options import ARGUMENTS, Option, Setting
from holdfast.cli.plan_commands import PURPOSES
from holdfast.cli.terminal import write_answer
from holdfast.config import DTYPES, LOAD_FORMATS, WEIGHT_CACHES
from holdfast.errors import ConfigError
from holdfast.memory.devices import GPUS
from holdfast.models.catalogue import CATALOGUE
from holdfast.quant.formats import ALL_KV_FORMATS, INDEX_FORMATS
from holdfast.quant.weight_schemes import EMBEDDING_CHOICES, UNQUANTIZED, WEIGHT_SCHEMES

SHELLS = ("bash", "zsh", "fish")
INSTALL = {
    "bash": 'eval "$(holdfast completion bash)" in ~/.bashrc',
    "zsh": 'eval "$(holdfast completion zsh)" in ~/.zshrc, after compinit',
    "fish": "holdfast completion fish > ~/.config/fish/completions/holdfast.fish",
}
VALUES: Mapping[str, tuple[str, ...]] = {
    "dtype": tuple(DTYPES),
    "device": ("auto", "cpu", "cuda"),
    "load_format": tuple(LOAD_FORMATS),
    "quantization": (UNQUANTIZED, *WEIGHT_SCHEMES),
    "quantized_embeddings": tuple(EMBEDDING_CHOICES),
    "weight_cache": tuple(WEIGHT_CACHES),
    "kv_cache_dtype": ("auto", *ALL_KV_FORMATS),
    "index_cache_dtype": ("auto", *INDEX_FORMATS),
    "kv_protected_dtype": ("auto", *ALL_KV_FORMATS),
    "formats": ("all", *(name for name, kv_format in ALL_KV_FORMATS.items() if kv_format.is_quantized)),
    "schemes": ("all", *WEIGHT_SCHEMES),
    "gpu": tuple(GPUS),
    "purpose": PURPOSES,
    "against": ("transformers",),
    "log_format": ("text", "json"),
    "host": ("127.0.0.1", "0.0.0.0"),
    "shell": SHELLS,
}
"""Values of an option, by the name of its field."""
FILES = ("FILE", "PATH", "MODEL")
"""Metavars that name something on disk."""


class Row(NamedTuple):
    """An option or an argument, for a shell."""

    flags: tuple[str, ...]
    """Flags to offer; empty for an argument."""
    help: str
    takes_value: bool = False
    values: tuple[str, ...] = ()
    is_file: bool = False
    others: tuple[str, ...] = ()
    """Spellings that are accepted and not offered."""


class Page(NamedTuple):
    """What may follow one command."""

    path: tuple[str, ...]
    summary: str
    rows: tuple[Row, ...]
    below: tuple[str, ...] = ()


def write_completion(shell: str | None, pages: Sequence[Page]) -> None:
    """Print the script of a shell."""
    if shell not in SHELLS:
        raise ConfigError("cli.unknown_shell", value=shell, accepted=SHELLS, install="; ".join(INSTALL.values()))
    write_answer(fish_script(pages) if shell == "fish" else bash_script(pages, is_zsh=shell == "zsh"))


def row_of(row: Option | Setting, path: tuple[str, ...]) -> Row:
    """Describe an option or an argument of a command for a shell."""
    is_argument = row.panel == ARGUMENTS
    flags = () if is_argument else row.all_flags
    offered = flags[:1] if isinstance(row, Setting) else flags
    values = tuple(CATALOGUE) if is_argument and path == ("plan",) else VALUES.get(row.name, ())
    return Row(offered, row.help, bool(row.metavar), values, row.metavar in FILES, flags[len(offered) :])


def bash_script(pages: Sequence[Page], is_zsh: bool = False) -> str:
    """Fill data/completion.bash: one function finds the command, then what may follow its last argument."""
    shell = "zsh" if is_zsh else "bash"
    head = [f"# Completion of holdfast for {shell}: {INSTALL[shell]}"]
    if is_zsh:
        head.append("autoload -U +X bashcompinit && bashcompinit")
    commands = "|".join(f'"{" ".join(("", *page.path))}"' for page in pages if page.path)
    cases = "\n".join(line for page in pages for line in _bash_page(page))
    script = resources.files("holdfast").joinpath("data", "completion.bash").read_text(encoding="utf-8")
    return "\n".join((*head, script.replace("@COMMANDS@", commands).replace("@CASES@", cases)))


def _bash_page(page: Page) -> list[str]:
    """Write the case of one command: the values of an option, else options and arguments."""
    options = [row for row in page.rows if row.flags]
    arguments = [row for row in page.rows if not row.flags]
    lines = [f'        "{" ".join(("", *page.path)) if page.path else ""}")', '            case "$prev" in']
    for row in options:
        if row.takes_value:
            files = " has_files=1" if row.is_file else ""
            lines.append(
                f'                {"|".join((*row.flags, *row.others))}) words="{" ".join(row.values)}" only_values=1{files} ;;'
            )
    flags = " ".join(flag for row in options for flag in row.flags)
    given = " ".join((*page.below, *(value for row in arguments for value in row.values)))
    files = '; [[ "$cur" == -* ]] || has_files=1' if any(row.is_file for row in arguments) else ""
    lines += [f'                *) words="{flags}" given="{given}"{files} ;;', "            esac ;;"]
    return lines


def fish_script(pages: Sequence[Page]) -> str:
    """Write a line for each command, option and argument, with its help."""
    lines = [f"# Completion of holdfast for fish: {INSTALL['fish']}", "complete -c holdfast -f"]
    summaries = {page.path: page.summary for page in pages}
    for page in pages:
        condition = _fish_condition(page)
        for name in page.below:
            summary = _fish_text(summaries.get((*page.path, name), ""))
            lines.append(f"complete -c holdfast -n {condition} -a {name} -d {summary}")
        lines += [f"complete -c holdfast -n {condition} {_fish_row(row)}".rstrip() for row in page.rows]
    return "\n".join((*lines, ""))


def _fish_condition(page: Page) -> str:
    """True after this path and before any of its subcommands."""
    if not page.path:
        return "__fish_use_subcommand"
    seen = [f"__fish_seen_subcommand_from {name}" for name in page.path]
    if page.below:
        seen.append(f"not __fish_seen_subcommand_from {' '.join(page.below)}")
    return _fish_text("; and ".join(seen))


def _fish_row(row: Row) -> str:
    words = [f"-a {_fish_text(' '.join(row.values))}"] if row.values else []
    if not row.flags:
        return " ".join((*(["-F"] if row.is_file else []), *words))
    names = []
    for name in row.flags:
        is_long = name.startswith("--")
        names.append(f"-l {name[2:]}" if is_long else f"-s {name[1:]}" if len(name) == 2 else f"-o {name[1:]}")
    value = ["-r -F" if row.is_file else "-x"] if row.takes_value else []
    return " ".join((*names, *value, *words, f"-d {_fish_text(row.help.partition('. ')[0].rstrip('.'))}"))


def _fish_text(text: str) -> str:
    """Quote a text for fish, which has only these two escapes."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
