"""Time and peak memory of a training step as users run it, against SGD and the peers: `python -m benchmarks.speed`.

cases      the networks, their records and their losses (`networks` and `hugging` build them)
methods    SGD, `sordino.Private` in its ways, Opacus in every mode, vmap, fastDP: each a loop that takes steps
starts     one fresh start: every method in a process of its own, all alive, taking turns
stacks     where the time of a step goes, by looking at the stack now and then
scale      a step as the records, the batch, the depth and the length of sequences grow
store      what was measured, one JSON file for each network

Nothing here reaches into Sordino: what is timed is what `from sordino import ...` gives to everyone.
"""
