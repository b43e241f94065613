"""What the demo ships: small enough, complete, and about the right model."""

import json
from pathlib import Path

import numpy as np

from trtllm_dspark.build.draft_vocab import read_token_counts
from trtllm_dspark.checkpoint import ModelConfig, load_drafter

DEMO = Path(__file__).parents[3] / "build_scripts" / "demo"

# SmolLM2-135M-Instruct, as its package's GGUF file describes it.
SMOLLM2 = ModelConfig(
    architecture="llama",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    rms_norm_eps=1e-5,
    rope_theta=1e5,
    max_position_embeddings=8192,
    tie_word_embeddings=True,
)


def test_demo_drafter_fits_smollm2_and_reads_completely() -> None:
    directory = DEMO / "smollm2-135m-drafter"
    assert sum(path.stat().st_size for path in directory.iterdir()) <= 16_000_000

    drafter = load_drafter(directory, SMOLLM2)

    config = drafter.config
    assert (config.block_size, config.markov_head, config.confidence) == (7, "vanilla", True)
    assert drafter.shares_embedding
    assert drafter.shares_lm_head
    for values in drafter.arrays.values():
        assert values.dtype == np.float32
        assert values.any()


def test_demo_token_counts_belong_to_smollm2_and_cover_its_responses() -> None:
    counts = read_token_counts(DEMO / "draft_vocab_counts.json", SMOLLM2.vocab_size)
    assert counts.sum() > 400_000
    # The smallest demo vocabulary keeps nine of ten tokens the target emits.
    assert np.sort(counts)[-4096:].sum() > 0.9 * counts.sum()


def test_demo_prompts_cover_three_domains() -> None:
    records = [json.loads(line) for line in (DEMO / "prompts.jsonl").read_text("utf-8").splitlines()]
    domains = [record["domain"] for record in records]
    assert len(records) >= 12
    assert all(domains.count(domain) >= 4 for domain in ("code", "math", "chat"))
    assert all(record["prompt"].strip() for record in records)
    assert len({record["prompt"] for record in records}) == len(records)
