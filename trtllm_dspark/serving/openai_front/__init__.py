"""An OpenAI-compatible HTTP front over the engine process: `trtllm-dspark serve --openai_port`.

It talks to the same socket as Triton's stubs, so both share one engine, one queue and one set of metrics.
"""
