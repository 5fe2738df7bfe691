"""Corpora: local files (`local.py`), rows of files (`rows.py`), data sets of the hub (`hub.py`), order (`sources.py`)."""
