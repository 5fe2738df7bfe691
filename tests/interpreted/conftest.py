"""Tests in processes of their own: the interpreter is there for good, and with it FLA's kernels (make test-kernels)."""

import calls

calls.start()
