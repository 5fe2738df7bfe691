"""The plans: what is split, one small file an architecture. Every module of this package and below is found by walking it.

    from titanplans import TPPlan, register_plan

A new one is a file beside these, or a module of your own package, named in the job (`[model] plan = "module:Class"`) or
by an entry point of the group "titanplans.plans".
"""

if __name__ != "titanplans.plans":
    raise ImportError(
        f"this folder is imported as titanplans.plans, not as {__name__}: write `from titanplans.plans...`, after "
        "`pip install -e .`"
    )
