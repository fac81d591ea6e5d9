"""Other people's training loops, one short file each; nothing here is imported unless it is asked for.

Accelerate and Lightning hook into the loop of one's own: batches from ``private.loader()``, then
``private.backward(losses)`` for the backward pass, and the optimizer's step as it is. The Trainers of transformers and
TRL take ``private.step()`` in the place of their inner loop.
"""
