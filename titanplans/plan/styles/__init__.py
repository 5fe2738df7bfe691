"""The styles that make up a plan, as declarations: which part of a module is cut, and how its parameters lie on the ranks.

    style                   parameters            gradient   input              output
    Region                  -                     -          enter              leave, if asked
    Colwise                 Shard(0)              Shard(0)   -                  -
    KVColwise               Shard(0), or heads that ranks share: Replicate, Partial
    Packed                  sections, each split  (layout)   -                  -
    Rowwise                 Shard(1)              Shard(1)   -                  leave, if asked; then the bias
    RowwiseInRegion         Shard(1)              Shard(1)   -                  summed, whole in the region; then the bias
    SplitNorm               Shard(0)              Shard(0)   -                  its statistic is that of all ranks
    GatheredInRegion        Replicate             Partial    gathered width     own shard of the width
    ReplicatedInRegion      Replicate             Partial    -                  -
    AddedToSum              Replicate, read as a part for each rank; Partial
    ReplicatedOnStream      Replicate             of stream  -                  -
    ReplicatedOffStream     Replicate             Replicate  -                  -
    Whole                   Replicate             Replicate  whole sequence     laid out as the stream again
    EndOfStream             Replicate             Replicate  whole sequence     whole
    VocabEmbedding          Shard(0)              Shard(0)   whole token ids    the sum: whole, or leave
    VocabHead               Shard(0)              Shard(0)   enter              vocabulary-sharded DTensor, or gathered

The table is that of the cut by weights. A style says nothing of hooks and collectives: a cut installs it
(`titanplans.split.tensors` by weights, `titanplans.split.tokens` by tokens). `enter` and `leave` are the borders of the
residual stream (`titanplans.split.stream`).

Inside a region everything is local, so one rule gives every gradient: a sharded parameter has a sharded gradient, and a
replicated one has a Partial gradient, because each rank has followed only its own share of the paths to the loss. On the
residual stream a replicated parameter's gradient is Partial if the sequence is sharded, and whole on every rank if not. Off
the stream every rank does the same work, and has whole gradients.

A key of a plan names a module, and its style all parameters that the module itself holds; or it names one parameter, and
the style is that parameter's alone. A plan may also hold any other torch `ParallelStyle`.
"""
