"""Serving: the engine's socket protocol, the Triton model repository and the launcher.

The modules that run inside Triton's Python stub (`framing`, `client`, `contract`, `request_fields`, `responses`,
`triton_model`, `metric_families`) import nothing but the standard library, numpy and msgpack.
"""
