"""A simulator: real clients and workers on a virtual clock, against the reference store, with faults from a seed."""
