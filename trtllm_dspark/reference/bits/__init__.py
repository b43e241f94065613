"""The core's arithmetic, bit for bit, in NumPy: the definition of docs/core_numerics.md as slow code.

`reference.*` says what is computed, in float64; `reference.bits.*` says which bits come out.
"""
