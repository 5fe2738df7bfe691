"""The private names of torch and torchao that titanplans relies on, a file a subject; nothing else touches one.

A private name may go with any release. A name belongs here only if torch has no public way to the same thing. Logic that
changes a library's internals stands with its one user, in a function with the mark `# private: …`, which
tests/test_torch_private.py counts. Methods that a subclass of torch's overrides stay with the subclass, and operators
(`torch.ops.…`) are reached by their qualified names, which graphs and exported programs hold.

Import a name from its subject, which imports no more than that subject needs. Everything but a job runs on torch
2.11, too (docs/parallel.md); these files and the marked functions hold the differences.
"""
