"""The core: standard library only, no files, no wall clock, no printing, no global state.

Two chains that meet only in whole numbers: weights <- model <- layouts <- families, sizing, and
request <- content <- engines <- metrics <- simulate, with cost beside it.
"""
