"""Model files and the models in them: readers, tokenizers, the catalogue, and one class an architecture."""

from octavo.models.llama import Decoder

ARCHITECTURES = {"llama": Decoder, "mistral": Decoder, "qwen2": Decoder, "qwen3": Decoder}
"""The class that runs each `ModelConfig.architecture`. The four differ by switches of the configuration alone."""
