"""The private names of torch and torchao that titanplans uses, with one file per subject.

Any release may remove a private name, so a name is here only if torch has no public equivalent. Three kinds of private
names are not here. Code that changes a library's internals stays with its only user, marked by `# private: …`;
tests/test_torch_private.py counts the marks. Overridden methods stay with their subclass. Operators (`torch.ops.…`) are
used by their qualified names, which are stable because graphs and exported programs contain them.

Import a name from the file of its subject, which imports only what that subject needs. Everything except jobs also runs on
torch 2.11 (docs/parallel.md). The differences between releases are in these files and in the marked functions.
"""
