"""Records of live traffic for training: opt-in, size-capped, without prompts (docs/file_formats.md)."""
