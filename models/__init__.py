"""The sizes of models, as data."""

if __name__ != "titanplans.models":
    raise ImportError(
        f"this folder is imported as titanplans.models, not as {__name__}: write `import titanplans.models`, after "
        "`pip install -e .`"
    )
