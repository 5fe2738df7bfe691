"""The sizes of models, as data: one TOML a family, a table a flavor. Each file here is found by walking this package.

The file's name is the family's name, by which jobs and commands know it (`[model] name = "gla"`, `flavor = "340M"`).
Above the tables:

    config_class    module and name of the config class, "transformers.LlamaConfig"
    undeclared      optional: keywords that the class takes without declaring a field of that name
    class           instead of config_class: a model of one's own, "module:Class"; a table has its constructor's keywords

A table has fields of the config that differ from the class's defaults; a nested config is a nested table. `[defaults]`
holds for all flavors; a flavor overrides what it names, in nested tables too. The text "none" is Python's None, which TOML
can't write. Comments give the source of the figures. Another package adds families by an entry point of the group
"titanplans.models" that names a package with such files.
"""

if __name__ != "titanplans.models":
    raise ImportError(
        f"this folder is imported as titanplans.models, not as {__name__}: write `import titanplans.models`, after "
        "`pip install -e .`"
    )
