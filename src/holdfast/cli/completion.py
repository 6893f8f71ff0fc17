"""`holdfast completion`: a script for bash, zsh or fish that knows every command, option and value; no torch.

All of it is written into the script, from the same tables that argparse is made of: pressing Tab starts no Python. zsh runs
the bash script through its own bashcompinit.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from holdfast.cli.options import ARGUMENTS, Option, Setting
from holdfast.cli.plan_commands import PURPOSES
from holdfast.cli.terminal import write_answer
from holdfast.config import DTYPES, LOAD_FORMATS, WEIGHT_CACHES
from holdfast.errors import ConfigError, shown
from holdfast.memory.devices import GPUS
from holdfast.models.catalogue import CATALOGUE
from holdfast.quant.formats import ALL_KV_FORMATS, INDEX_FORMATS
from holdfast.quant.weight_schemes import EMBEDDING_CHOICES, UNQUANTIZED, WEIGHT_SCHEMES

SHELLS = ("bash", "zsh", "fish")
INSTALL = {
    "bash": 'eval "$(holdfast completion bash)" in ~/.bashrc',
    "zsh": 'eval "$(holdfast completion zsh)" in ~/.zshrc, behind compinit',
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
"""What may be typed behind an option, by the name of its field; where there is no end to it nothing is offered."""
FILES = ("FILE", "PATH", "MODEL")
"""Metavars that name something on disk."""


class Row(NamedTuple):
    """An option or an argument, as a shell has to know it."""

    flags: tuple[str, ...]
    """Those that are offered; nothing for an argument."""
    help: str
    takes_value: bool = False
    values: tuple[str, ...] = ()
    is_file: bool = False
    others: tuple[str, ...] = ()
    """Spellings that are understood and not offered."""


class Page(NamedTuple):
    """What may follow one command; a command with others below it has these alone."""

    path: tuple[str, ...]
    summary: str
    rows: tuple[Row, ...]
    below: tuple[str, ...] = ()


def write_completion(shell: str | None, pages: Sequence[Page]) -> None:
    """Print the script of a shell."""
    if shell not in SHELLS:
        raise ConfigError(
            "a completion script was asked for" if shell is None else f"completion of {shown(shell)} was asked",
            f"there are scripts for {', '.join(SHELLS)}",
            "name one of them: " + "; ".join(INSTALL.values()),
        )
    write_answer(fish_script(pages) if shell == "fish" else bash_script(pages, is_zsh=shell == "zsh"))


def row_of(row: Option | Setting, path: tuple[str, ...]) -> Row:
    """What a shell has to know of an option or an argument of a command."""
    is_argument = row.panel == ARGUMENTS
    offered = row.all_flags
    if is_argument:
        offered = ()
    elif isinstance(row, Setting):
        offered = row.all_flags[:1]
    others = () if is_argument else tuple(name for name in row.all_flags if name not in offered)
    values = tuple(CATALOGUE) if is_argument and path == ("plan",) else VALUES.get(row.name, ())
    return Row(offered, row.help, bool(row.metavar), values, row.metavar in FILES, others)


def bash_script(pages: Sequence[Page], is_zsh: bool = False) -> str:
    """One function: find the command in the words so far, then what may stand behind the last of them."""
    shell = "zsh" if is_zsh else "bash"
    head = [f"# Completion of holdfast for {shell}: {INSTALL[shell]}"]
    if is_zsh:
        head.append("autoload -U +X bashcompinit && bashcompinit")
    deeper = "|".join(f'"{" ".join(("", *page.path))}"' for page in pages if page.path)
    lines = [
        *head,
        "_holdfast() {",
        '    local cur="${COMP_WORDS[COMP_CWORD]}" prev="${COMP_WORDS[COMP_CWORD-1]}" given="" before="" at="" words="" i',
        "    local has_files=0 only_values=0",
        "    COMPREPLY=()",
        "    # --option=value is one word, or three where = ends a word.",
        '    if [[ "$cur" == "=" ]]; then cur=""',
        '    elif [[ "$prev" == "=" ]]; then prev="${COMP_WORDS[COMP_CWORD-2]}"',
        '    elif [[ "$cur" == --*=* ]]; then before="${cur%%=*}="; prev="${cur%%=*}"; cur="${cur#*=}"; fi',
        "    for ((i = 1; i < COMP_CWORD; i++)); do",
        '        case "$at ${COMP_WORDS[i]}" in',
        f'            {deeper}) at="$at ${{COMP_WORDS[i]}}" ;;',
        "            *) break ;;",
        "        esac",
        "    done",
        '    case "$at" in',
        *(line for page in pages for line in _bash_page(page)),
        "    esac",
        '    if [[ $only_values == 0 && "$cur" != -* ]]; then words="$given"; fi',
        '    COMPREPLY=($(compgen -P "$before" -W "$words" -- "$cur"))',
        "    # A name that nothing begins with as it is typed is tried in any case: qwen3 for Qwen3-8B, H1 for h100.",
        '    if [[ ${#COMPREPLY[@]} == 0 && -n "$cur" && -n "$words" ]]; then',
        '        COMPREPLY=($(compgen -W "$words" | typed="$cur" before="$before" awk \\',
        '            \'index(tolower($0), tolower(ENVIRON["typed"])) == 1 { print ENVIRON["before"] $0 }\'))',
        "    fi",
        "    if [[ $has_files == 1 ]]; then",
        "        local IFS=$'\\n'",
        "        compopt -o filenames 2>/dev/null",
        '        COMPREPLY+=($(compgen -P "$before" -f -- "$cur"))',
        "    fi",
        "}",
        "complete -F _holdfast holdfast",
    ]
    return "\n".join((*lines, ""))


def _bash_page(page: Page) -> list[str]:
    """The case of one command: what may follow an option, else its options and arguments."""
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
    """A line for each command, option and argument, with its help beside it."""
    lines = [f"# Completion of holdfast for fish: {INSTALL['fish']}", "complete -c holdfast -f"]
    summaries = {page.path: page.summary for page in pages}
    for page in pages:
        condition = _fish_condition(page)
        for name in page.below:
            told = summaries.get((*page.path, name), "")
            lines.append(f"complete -c holdfast -n {condition} -a {name} -d {_fish_text(told)}")
        lines += [f"complete -c holdfast -n {condition} {_fish_row(row)}".rstrip() for row in page.rows]
    return "\n".join((*lines, ""))


def _fish_condition(page: Page) -> str:
    """True where these are the words before, and none of the commands below is typed yet."""
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
    """Quoted: fish knows no other escapes between single quotes than these."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
