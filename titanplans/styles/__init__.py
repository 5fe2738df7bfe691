"""The styles that plans are made of, one class per file. Start at `rowwise.py`.

A plan maps module names to styles; a key may also name a single parameter. Any other torch `ParallelStyle` is accepted, too.

The gradient of a parameter follows from where its module is:

    inside a region        sharded parameter: sharded. Replicated parameter: partial, since each rank's backward covers only
                           its heads or its slice of the width.
    on the stream          replicated parameter: partial if the sequence is sharded, else replicated
    off the stream         replicated: every rank does the same work and has the full gradient

In the examples B is the batch size, L the sequence length, D the hidden size, and f this rank's shard of an inner width F.
"""
