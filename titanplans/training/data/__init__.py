"""Text in, batches out: corpora, the committed tokenizer, packing, and a loader that resumes exactly."""
