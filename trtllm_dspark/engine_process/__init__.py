"""The process that owns the engine: `python -m trtllm_dspark.engine_process --engine_dir E --socket S`.

    connections (I/O thread) ──> intake (thread: limits, tokeniser) ──> loop (main thread: queue, session, deadlines)
            ^                                                                     │
            └───────────── one `outputs` frame per connection and round ──────────┘

Clients are the stubs of Triton's models, the OpenAI front and the launcher; they speak `serving.framing`.
"""
