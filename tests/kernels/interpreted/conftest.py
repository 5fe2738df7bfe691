"""These tests need processes of their own (make test-kernels), because Triton's interpreter can't be uninstalled."""

from tests.support.interpreted import calls

calls.start()
