"""All messages can be read in one place, tests/messages.txt."""

import messages


def test_the_page_of_messages_is_fresh():
    assert messages.PAGE.read_text() == messages.page(), "run python tests/messages.py, and commit its diff"


def test_a_message_of_each_kind_is_collected():
    """A class, a function of an option, one that returns an error, and a check that yields an option."""
    kinds = {name.split()[0] for file in messages.files() for name, _ in messages.messages(file)}
    assert kinds >= {"PlanError", "OptionError", "error", "refuse", "refuses", "does_not_run"}
