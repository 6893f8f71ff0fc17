"""Options arrive as they were typed: typer's checks, whose library takes a tenth of a second to import, are left out; no torch."""

from typing import Any


class AsTyped:
    """What typer asks about a value, with no opinion of its own: every setting reads and refuses its text itself."""

    def coerce(self, value: object, param: Any, ctx: object) -> object:  # noqa: ANN401 a class of typer's that has no public name
        """The value; a list where the option may be repeated."""
        if param.multiple or param.nargs == -1:
            return list(value) if isinstance(value, list | tuple) else []
        return value


def take_as_typed(command: Any, parent: Any = None) -> None:  # noqa: ANN401 the same
    """Let a command and those below it take texts, lists of texts and switches unchecked.

    Versions of typer without this hook check by cheaper means, and are left alone.
    """
    # With a context the command makes its help option, which would be checked too.
    context = command.context_class(command, parent=parent, **command.context_settings)
    for parameter in command.get_params(context):
        if hasattr(parameter, "_runtime_param"):
            parameter._runtime_param = AsTyped()
    for inner in getattr(command, "commands", {}).values():
        take_as_typed(inner, context)
