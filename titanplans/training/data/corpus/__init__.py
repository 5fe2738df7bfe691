"""Corpora: text files (`local.py`), rows of files (`rows.py`), data sets of the hub (`hub.py`). Start at `sources.py`."""
