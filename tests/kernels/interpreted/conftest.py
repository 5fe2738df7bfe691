"""Tests that need processes of their own, because Triton's interpreter can't be removed (make test-kernels)."""

from tests.support.interpreted import calls

calls.start()
