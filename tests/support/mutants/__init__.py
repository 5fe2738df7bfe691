"""Mutants: plans with one fault each. A proof has to reject every mutant and to name the module with the fault.

architectures   a tiny model for each registered plan, with every option that changes its styles
faults          styles with one fault
operators       changes of the style at one key
corpus          every operator at every key; only once if several plans have the same style at a key
prove           the verdict on each mutant
place           the modules that a verdict may name
equivalent      the mutants that change nothing, and why
"""
