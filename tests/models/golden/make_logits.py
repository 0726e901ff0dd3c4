"""Writes logits.json: what Transformers computes for the tiny models of tests/models/tiny.py, in float32.

Run from the repository root where torch and transformers are installed: python -m tests.models.golden.make_logits
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch
import transformers
from tests.models import tiny

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 96,
}
CASES: dict[str, dict] = {
    "llama": {"config": tiny.config("llama")},
    "llama, tied": {"config": tiny.config("llama", tie_word_embeddings=True)},
    "llama, biased": {"config": tiny.config("llama", attention_bias=True), "bias": True},
    "llama, llama3 rope": {"config": tiny.config("llama", rope_theta=500000.0, rope_scaling=LLAMA3)},
    "mistral, window 5": {"config": tiny.config("mistral")},
    "mistral, no window": {"config": tiny.config("mistral", sliding_window=None)},
    "qwen2": {"config": tiny.config("qwen2")},
    "qwen3": {"config": tiny.config("qwen3")},
}
POSITIONS, COLUMNS = [0, 1, 17, 39], 40


def main() -> None:
    ids = [(7 * i * i + 3 * i + 11) % 250 for i in range(40)]
    made = {
        "by": f"transformers {transformers.__version__}, torch {torch.__version__}, float32",
        "ids": ids,
        "cases": {},
    }
    for name, case in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            weights = tiny.tensors(case["config"], bias=case.get("bias"))
            tiny.write_folder(Path(folder), case["config"], weights)
            model = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, attn_implementation="eager"
            )
            with torch.no_grad():
                logits = model(torch.tensor([ids])).logits[0]
        rows = {p: [round(x, 5) for x in logits[p, :COLUMNS].tolist()] for p in POSITIONS}
        made["cases"][name] = {**case, "rows": rows}
    Path(__file__).with_name("logits.json").write_text(json.dumps(made) + "\n")


if __name__ == "__main__":
    main()
