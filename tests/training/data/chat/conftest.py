"""A chat template and files of conversations."""

import pytest

from tests.support.conversations import MARKED
from tests.support.data_sources import write_rows
from titanplans.config.sections.data import Chat


@pytest.fixture
def chat(tmp_path):
    """`Chat` with a template, by its text."""

    def chat(template=MARKED, **options):
        (tmp_path / "chat.jinja").write_text(template, encoding="utf-8")
        return Chat(enable=True, chat_template=str(tmp_path / "chat.jinja"), **options)

    return chat


@pytest.fixture
def rows(tmp_path):
    """The path of a file of rows, of messages where they are no dicts."""

    def rows(*rows):
        rows = [row if isinstance(row, dict) else {"messages": row} for row in rows]
        return write_rows(tmp_path / "rows.jsonl", rows)

    return rows
