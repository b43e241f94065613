"""The paper's equations in NumPy, slow and readable: what every other implementation is compared with.

`models` runs target and drafter, `decode` is the whole round of one request, `heads`, `chain`, `schedule`, `acceptance`
and `packing` are its steps in float64; `bits` gives the core's results bit for bit (docs/core_numerics.md).
"""
