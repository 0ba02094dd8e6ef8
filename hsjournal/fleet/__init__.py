"""Many machines: one shard a node, placed and restarted by Ray or Slurm; we number the starts and read the results.

Every start of a shard claims the next number, its incarnation, from a store outside the node (:mod:`.numbers`) and
wears it as a badge in the run directory (:mod:`.badge`). Whoever reads many run directories (:mod:`.members`) lets
the highest incarnation of each shard count; so an older start that still lives can write what it likes.
"""
