"""The sizes of models, as data: one TOML file for each family, with one table for each flavor.

The file has the name of its family, which jobs and commands use (`[model] name = "gla"`, `flavor = "340M"`). All files in
this package are discovered. Keys above the tables:

    config_class    module and name of the config class, "transformers.LlamaConfig"
    undeclared      optional: keywords that the class accepts although it declares no field of this name
    class           instead of config_class: a user's model, "module:Class"; a table then has keywords of its constructor

A table has the fields of the config that differ from the class's defaults; a nested config is a nested table. `[defaults]`
applies to all flavors; a flavor overrides the fields that it names, also in nested tables. The text "none" is Python's
None, which TOML can't express. Comments give the sources of the numbers. Another package adds families through an entry
point of the group
"titanplans.models" that names a package with such files.
"""

if __name__ != "titanplans.models":
    raise ImportError(
        f"this folder is imported as titanplans.models, not as {__name__}: write `import titanplans.models`, after "
        "`pip install -e .`"
    )
