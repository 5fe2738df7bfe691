"""Mutants: plans with one fault each, which a proof has to reject and to place.

architectures   a tiny model for each registered plan, with every option that changes its styles
faults          styles with one fault
operators       what is done to the style of one key
corpus          every operator on every key, once where plans agree
prove           verdicts, and which place is the right one
equivalent      the mutants that change nothing, and why
"""
