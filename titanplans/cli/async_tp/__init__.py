"""`titanplans async-tp`: what async tensor parallelism would fuse, decided without a GPU."""
