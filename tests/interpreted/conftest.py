"""Tests that need processes of their own, because Triton's interpreter can't be removed (make test-kernels)."""

import calls

calls.start()
