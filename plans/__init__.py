"""The plans: how each architecture is split, one small file each. Every module in and below this package is found.

    from titanplans import TPPlan, register_plan

A new one is a file in this package, or a module of your own package, named in the job (`[model] plan = "module:Class"`) or
by an entry point of the group "titanplans.plans".
"""

if __name__ != "titanplans.plans":
    raise ImportError(
        f"this folder is imported as titanplans.plans, not as {__name__}: write `from titanplans.plans...`, after "
        "`pip install -e .`"
    )
