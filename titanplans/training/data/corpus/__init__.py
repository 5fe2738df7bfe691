"""Corpora: files, data sets of the hub, and their documents in order."""
