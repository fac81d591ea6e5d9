"""Other people's training loops, one short file each; nothing here is imported unless it is asked for.

Both hook into the loop of one's own: batches from ``private.loader()``, ``private.backward(losses)`` for the backward
pass, and the optimizer's step as it is.
"""
