"""These tests have processes of their own: Triton's interpreter is for good, and FLA's kernels are there (make test-kernels)."""

import calls

calls.start()
