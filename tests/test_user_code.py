"""An error in the user's code names a line of this code, even if another library raises the error."""

import pytest

from titanplans.errors import PlanError
from titanplans.user_code import import_module

SOURCES = {
    "own": "def f():\n    return 1 / 0\nf()",
    "of_python": 'import json\njson.loads("{")',
    "of_a_library": 'import numpy\nnumpy.load("missing.npy")',
}


@pytest.mark.parametrize("name", SOURCES)
def test_the_location_is_in_the_code_of_the_user(name, tmp_path, monkeypatch):
    (tmp_path / f"theirs_{name}.py").write_text(SOURCES[name])
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(PlanError, match=rf"theirs_{name}\.py, line 2\)$"):
        import_module(f"theirs_{name}", "plan")
