"""The measuring instrument: one file per question in `experiments`, every number from a record.

`measure` is the only module that times, `record` the only one that writes results; `findings`,
`plots` and `report` are pure functions of what was recorded. Nothing is imported here, so reading
the cached ceilings (`machine`) costs neither an engine nor matplotlib.
"""
