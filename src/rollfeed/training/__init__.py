"""Training: batches become new weights.

Packing (:mod:`rollfeed.training.packing`) needs no PyTorch; the rest does, and nothing is imported here.
"""
