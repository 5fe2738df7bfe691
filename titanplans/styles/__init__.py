"""The styles that plans are made of: one class, in one file, says all that is true of a style. Start at `rowwise.py`.

A plan maps the names of modules to styles; a key may also name one parameter, whose style is then that parameter's alone.
It may hold any other torch `ParallelStyle`, too.

Which gradient a parameter gets follows from where its module stands. Inside a region everything is local, so a sharded
parameter has a sharded gradient, and a replicated one a partial gradient, because each rank has followed only its own paths
to the loss. On the residual stream a replicated parameter's gradient is partial if the sequence is sharded, and replicated
if not. Off the stream every rank does the same work, and has the full gradient.

In the examples B is the batch, L the sequence, D the hidden size, f this rank's shard of an inner width F.
"""
