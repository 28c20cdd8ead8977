"""Arithmetic about a model that nobody has to load: bytes it needs, time its steps should take.

Exact arithmetic first (`model`, `memory`); terms that had to be measured are named and passed in
(`Ceilings` in `steptime`). Standard library and rich only, never torch.
"""
