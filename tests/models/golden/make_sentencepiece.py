"""Writes sentencepiece.json: a vocabulary trained on this repository's LICENSE, and what SentencePiece makes of texts.

Run from the repository root where sentencepiece is installed: python -m tests.models.golden.make_sentencepiece
"""

from __future__ import annotations

import io
import json
from pathlib import Path

import sentencepiece

TEXTS = [
    "the License", " the License", "  two  spaces", "", " ", "a", "Licensor shall mean\n\tthe copyright owner",
    "10.5 %", "distribution of the Work", "naïve café", "日本語", "🚀", "x" * 40, "TERMS AND CONDITIONS", "e\u0301",
    "contributions,",
]  # fmt: skip


def main() -> None:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        input="LICENSE",
        model_writer=model,
        model_type="bpe",
        vocab_size=600,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=True,
        split_digits=True,
    )
    sp = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    kinds = [
        2 if sp.is_unknown(i) else 3 if sp.is_control(i) else 6 if sp.is_byte(i) else 1 for i in range(sp.vocab_size())
    ]
    made = {
        "by": f"sentencepiece {sentencepiece.__version__}",
        "pieces": [sp.id_to_piece(i) for i in range(sp.vocab_size())],
        "scores": [sp.get_score(i) for i in range(sp.vocab_size())],
        "types": kinds,
        "texts": [{"text": text, "ids": sp.encode(text)} for text in TEXTS],
    }
    Path(__file__).with_name("sentencepiece.json").write_text(json.dumps(made) + "\n")


if __name__ == "__main__":
    main()
