"""Paged attention for decoding on a GPU: the CUDA source, its variants, the plan, the judge and the launch."""
