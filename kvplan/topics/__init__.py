"""The topics of `kvplan explain`, a file each: a founding idea worked through with a model's own numbers.

A topic computes: by the sizing code, and by running the engines on small traces. `parts` is what it is made of.
"""
