"""The plans: one small file for each architecture. All modules in this package and its subpackages are discovered.

    from titanplans import TPPlan, register_plan

A new plan is a file in this package, or a module of your own package that a job names (`[model] plan =
"module:Class"`), or an entry point of the group "titanplans.plans".
"""

if __name__ != "titanplans.plans":
    raise ImportError(
        f"this folder is imported as titanplans.plans, not as {__name__}: write `from titanplans.plans...`, after "
        "`pip install -e .`"
    )
