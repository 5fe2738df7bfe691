"""Messages are read in one place, tests/messages.txt, and phrases that make a sentence hard to read only get fewer."""

import messages

MOST = {
    "what is": 20,
    "of which": 6,
    "beside": 1,
    "is no folder": 1,
    "once is enough": 0,
    "which one holds": 0,
    "it does nothing with": 0,
    "nothing is compiled so": 0,
    "named twice": 0,
    "half of a character": 0,
    "they are there once": 0,
    "can't be had": 0,
    "none is up": 0,
    "leave this out": 0,
}
"""How often a phrase may stand in messages and docstrings of titanplans and plans. Lower it where you remove one."""


def test_the_page_of_messages_is_fresh():
    assert messages.PAGE.read_text() == messages.page(), "run python tests/messages.py, and commit its diff"


def test_banned_phrases_get_fewer():
    found = messages.phrase_counts(MOST)
    assert not {phrase: number for phrase, number in found.items() if number > MOST[phrase]}


def test_a_message_of_each_kind_is_collected():
    """A class, a function of an option, one that returns an error, and a check that yields an option."""
    kinds = {name.split()[0] for file in messages.files() for name, _ in messages.messages(file)}
    assert kinds >= {"PlanError", "OptionError", "error", "refuse", "refuses", "does_not_run"}
