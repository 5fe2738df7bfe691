"""Text in, batches out: corpora, the committed tokenizer, packing, and a loader that resumes exactly.

A job is checked before its device is chosen, so `checks`, `chat`, `corpus` and `vocabulary` import no torchtitan.
"""
