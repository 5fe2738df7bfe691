"""Fixtures: a chat template, and files of conversations."""

import pytest

from tests.support.conversations import MARKED
from tests.support.data_sources import write_rows
from titanplans.config.sections.data import Chat


@pytest.fixture
def chat(tmp_path):
    """Return a function that makes a `Chat` from the text of its template."""

    def chat(template=MARKED, **options):
        (tmp_path / "chat.jinja").write_text(template, encoding="utf-8")
        return Chat(enable=True, chat_template=str(tmp_path / "chat.jinja"), **options)

    return chat


@pytest.fixture
def rows_file(tmp_path):
    """Return a function that writes rows to a file and returns its path; a row may be a list of messages."""

    def write(*rows):
        rows = [row if isinstance(row, dict) else {"messages": row} for row in rows]
        return write_rows(tmp_path / "rows.jsonl", rows)

    return write
