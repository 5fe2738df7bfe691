"""Degrees, the device mesh, process groups and how ranks find each other."""
