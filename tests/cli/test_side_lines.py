import sys

from holdfast.cli.side_lines import write_line


def test_a_line_goes_to_stderr(capsys):
    write_line("one")
    write_line("")
    assert capsys.readouterr() == ("", "one\n\n")


def test_without_stderr_nothing_is_said(monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    write_line("one")
