"""`holdfast completion`: a bash, zsh or fish script with every command, option and value; no torch.

The script is self-contained, so Tab starts no Python. zsh runs the bash script through its bashcompinit.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from holdfast.cli.options import ARGUMENTS, Option, Setting
from holdfast.cli.plan_commands import PURPOSES
from holdfast.cli.terminal import write_answer
from holdfast.config import DTYPES, KV_QUALITIES, LOAD_FORMATS, PACKED_ACTIVATIONS, PACKED_WEIGHTS, WEIGHT_CACHES
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
    "packed_weights": PACKED_WEIGHTS,
    "packed_activations": PACKED_ACTIVATIONS,
    "weight_cache": tuple(WEIGHT_CACHES),
    "kv_cache_dtype": ("auto", *ALL_KV_FORMATS),
    "kv_quality": KV_QUALITIES,
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
"""Metavars of files and folders."""


class Row(NamedTuple):
    """An option or an argument, for a shell."""

    flags: tuple[str, ...]
    """Flags to offer; empty for an argument."""
    help: str
    takes_value: bool = False
    values: tuple[str, ...] = ()
    is_file: bool = False
    others: tuple[str, ...] = ()
    """Accepted flags that completion does not offer."""


class Page(NamedTuple):
    """Completions after one command."""

    path: tuple[str, ...]
    summary: str
    rows: tuple[Row, ...]
    below: tuple[str, ...] = ()

    @property
    def typed(self) -> str:
        """The path after a space; empty for the program itself."""
        return " ".join(("", *self.path))

    @property
    def options(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.flags)

    @property
    def arguments(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if not row.flags)

    @property
    def condition(self) -> str:
        """A fish condition, true after this path and before its subcommands."""
        if not self.path:
            return "__fish_use_subcommand"
        seen = [f"__fish_seen_subcommand_from {name}" for name in self.path]
        if self.below:
            seen.append(f"not __fish_seen_subcommand_from {' '.join(self.below)}")
        return _fish_text("; and ".join(seen))


def write_completion(shell: str | None, pages: Sequence[Page]) -> None:
    """Print the script of a shell."""
    if shell not in SHELLS:
        raise ConfigError("cli.unknown_shell", value=shell, accepted=SHELLS, install="; ".join(INSTALL.values()))
    from jinja2 import Environment, PackageLoader

    # zsh runs the script of bash through its bashcompinit.
    name = "completion.fish.jinja" if shell == "fish" else "completion.bash.jinja"
    templates = Environment(loader=PackageLoader("holdfast", "data"), keep_trailing_newline=True)
    templates.filters["quoted"] = _fish_text
    summaries = {page.path: page.summary for page in pages}
    write_answer(
        templates.get_template(name).render(name=shell, install=INSTALL[shell], pages=pages, summaries=summaries)
    )


def row_of(row: Option | Setting, path: tuple[str, ...]) -> Row:
    """Describe an option or an argument of a command for a shell."""
    is_argument = row.panel == ARGUMENTS
    flags = () if is_argument else row.all_flags
    offered = flags[:1] if isinstance(row, Setting) else flags
    values = tuple(CATALOGUE) if is_argument and path == ("plan",) else VALUES.get(row.name, ())
    return Row(offered, row.help, bool(row.metavar), values, row.metavar in FILES, flags[len(offered) :])


def _fish_text(text: str) -> str:
    """Quote a text for fish, which has only these two escapes."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
