"""The prose of the tree follows tests/voice_rules.py, without exceptions."""

from pathlib import Path

import pytest

from voice_rules import FOLDERS, PAGES, faults_of, files

FIELD_WORDS = {
    "all-reduce": "src/holdfast/distributed",
    "all-gather": "src/holdfast/distributed",
    "reduce-scatter": "docs",
    "wgmma": "src/holdfast/kernels",
    "watchdog": "src/holdfast/engine",
    "block table": "src/holdfast/runner",
    "draft token": "src/holdfast/engine",
    "grammar": "src/holdfast/text",
    "occupancy": "src/holdfast/kernels",
    "specialization": "src/holdfast/runner",
}
"""Words of the field that a reader greps for, and a folder that has each."""


@pytest.mark.parametrize("place", [*FOLDERS, *PAGES])
def test_prose_has_no_banned_phrase(place: str) -> None:
    faults = [str(fault) for path in files(place) for fault in faults_of(path)]
    assert not faults, "\n".join(faults[:50])


def test_banned_phrases_in_every_kind_of_text_are_found(tmp_path: Path) -> None:
    path = tmp_path / "bad.py"
    path.write_text(
        '"""The same as before."""\n'
        "# nobody reads this\n"
        "def was_told(asked: int) -> str:\n"
        '    """Of a thing."""\n'
        "    torch.where(x)\n"
        '    return f"{asked} at the\\nmost"\n'
    )
    found = sorted((fault.line, fault.phrase) for fault in faults_of(path))
    assert found == [(1, "The same"), (2, "nobody"), (3, "asked"), (3, "told"), (4, "Of"), (6, "at the most")]


@pytest.mark.parametrize(("word", "folder"), FIELD_WORDS.items())
def test_words_of_the_field_can_be_found(word: str, folder: str) -> None:
    assert any(word in path.read_text(encoding="utf-8").lower() for path in files(folder)), word
