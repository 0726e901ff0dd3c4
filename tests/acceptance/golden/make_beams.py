"""Writes beams.json: beam searches by Hugging Face Transformers in float32, from the same dequantised file.

python tests/acceptance/golden/make_beams.py SmolLM2-135M-Instruct.Q4_1.gguf

Needs torch, transformers, gguf and accelerate.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

PROMPTS = ([504, 3575, 282, 4649, 314], [788, 216, 33, 41, 38, 41, 392, 13197])
STOPS = [2, 0, 30]  # the model's own ends of text, and a full stop
SEARCHES = ((4, 1.0), (3, 0.0), (4, 2.0))  # width, length penalty


def main(file: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()
    rows = []
    for prompt in PROMPTS:
        for width, length_penalty in SEARCHES:
            found = model.generate(
                torch.tensor([prompt]),
                num_beams=width,
                num_return_sequences=width,
                max_new_tokens=24,
                length_penalty=length_penalty,
                early_stopping=False,
                do_sample=False,
                eos_token_id=STOPS,
                pad_token_id=-1,
                output_scores=True,
                return_dict_in_generate=True,
            )
            beams = [[token for token in beam if token >= 0] for beam in found.sequences[:, len(prompt) :].tolist()]
            scores = [round(score, 6) for score in found.sequences_scores.tolist()]
            rows.append(
                {"prompt": prompt, "width": width, "length_penalty": length_penalty, "beams": beams, "scores": scores}
            )
    path = Path(__file__).with_name("beams.json")
    path.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
