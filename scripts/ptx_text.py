"""Normal form of PTX: equal texts compute the same, whatever a kernel, its parameters, registers and labels are called."""

import re

IDENTIFIER = re.compile(r"%[A-Za-z]+\d+(?:_\d+)?|\$L__\w+|[A-Za-z_$][\w$]*")
REGISTER = re.compile(r"%(?:r|rd|rs|f|fd|p|rh|rq|h|b|hh|rc|q)\d+")
LABEL = re.compile(r"\$L__\w+")
DECLARED = re.compile(
    r"\.(?:entry|func|global|shared|extern|visible|weak|param)\b[^;{(]*?([A-Za-z_$][\w$]*)(?=\s*[\[({;,)]|\s*$)"
)
PARAMETER_LOAD = re.compile(r"^ld\.param\S*\s+(\{[^}]*\}|%\w+),\s*\[(\w+?)(\+\d+)?\];$")
REGISTER_COUNT = re.compile(r"^\.reg\b.*;$")


def normal_form(ptx: str) -> str:
    """Drop comments, line marks and debug sections; number every name by its first use."""
    lines = _code_lines(ptx)
    names = _declared_names(lines)
    body = [line for line in lines if not PARAMETER_LOAD.match(line) and not _is_parameter(line)]
    numbers: dict[str, str] = {}

    def number(match: re.Match[str]) -> str:
        word = match[0]
        if REGISTER.fullmatch(word):
            kind = re.sub(r"\d+$", "", word)
        elif LABEL.fullmatch(word):
            kind = "$L"
        elif word in names:
            kind = "@"
        else:
            return word
        if word not in numbers:
            numbers[word] = f"{kind}.{sum(known.startswith(f'{kind}.') for known in numbers.values())}"
        return numbers[word]

    text = [IDENTIFIER.sub(number, line) for line in body]
    loads = sorted(_load_form(line, numbers) for line in lines if PARAMETER_LOAD.match(line))
    kinds = sorted(_parameter_kind(line) for line in lines if _is_parameter(line))
    return "\n".join([*kinds, *loads, *text])


def _code_lines(ptx: str) -> list[str]:
    code = re.sub(r"/\*.*?\*/", "", ptx, flags=re.DOTALL)
    code = re.sub(r"^\s*\.section\b.*?^\s*\}", "", code, flags=re.DOTALL | re.MULTILINE)
    lines = (re.sub(r"//.*", "", line).strip() for line in code.splitlines())
    skipped = (".loc", ".file", ".version", ".target", "$L__tmp")  # the last is a label of debug sections only
    return [
        re.sub(r"\s+", " ", line)
        for line in lines
        if line and not line.startswith(skipped) and not REGISTER_COUNT.match(line)
    ]


def _declared_names(lines: list[str]) -> set[str]:
    return {match[1] for line in lines for match in DECLARED.finditer(line)}


def _is_parameter(line: str) -> bool:
    return line.startswith(".param ")


def _parameter_kind(line: str) -> str:
    return re.sub(r"\s*\w+(\[\d+\])?,?$", r"\1", line)


def _load_form(line: str, numbers: dict[str, str]) -> str:
    """Describe a load by the registers that it fills: the parameter's name and place do not count."""
    match = PARAMETER_LOAD.match(line)
    assert match is not None, line
    registers = REGISTER.sub(lambda found: numbers.get(found[0], "unused"), match[1])
    return f"{line.split()[0]} {registers} {match[3] or ''}".strip()
