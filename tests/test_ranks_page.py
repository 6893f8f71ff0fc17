"""docs/ranks.md: its tables are what plans say."""

from rank_tables import DOCUMENT, written


def test_ranks_page_tables_match_plans() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert text == written(text), "run: python scripts/rank_tables.py"
