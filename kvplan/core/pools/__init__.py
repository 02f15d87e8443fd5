"""Pools of the engines beside vLLM: each module has an engine's rules for defaults and its pool."""
