"""Parallelism degrees, the device mesh, the process group and its rendezvous."""
