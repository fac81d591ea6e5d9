"""Other people's training loops, one short file each; nothing here is imported until it is needed.

With Accelerate and Lightning you write the loop: batches from ``private.loader()``, then ``private.backward(losses)``
for the backward pass, and the optimizer's step unchanged. The Trainers of transformers and TRL call ``private.step()``
in place of their inner loop.
"""
