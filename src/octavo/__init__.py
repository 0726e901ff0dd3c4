"""Octavo serves language models from a paged KV cache.

>>> from octavo import LLM, SamplingParams
>>> with LLM("smollm2-135m") as llm:
...     [output] = llm.generate("The capital of France is", SamplingParams(temperature=0))

Everything here is imported when it is first used: `import octavo` and the control plane (`octavo.cache`,
`octavo.scheduler`) load no array library and no native code.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.config import EngineConfig
    from octavo.engine.llm import LLM, RequestOutput
    from octavo.errors import AuditError, ConfigError, InvalidRequest, ModelError, OctavoError, RequestTooLarge
    from octavo.types import Guide, SamplingParams

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AuditError",
    "ConfigError",
    "EngineConfig",
    "Guide",
    "InvalidRequest",
    "ModelError",
    "OctavoError",
    "RequestOutput",
    "RequestTooLarge",
    "SamplingParams",
    "__version__",
]

_HOME = {
    "EngineConfig": "config",
    "Guide": "types",
    "LLM": "engine.llm",
    "RequestOutput": "engine.llm",
    "SamplingParams": "types",
}


if not TYPE_CHECKING:  # a type checker reads the imports above, and knows what is not there

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module 'octavo' has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(f"octavo.{_HOME.get(name, 'errors')}"), name)
        return value

    def __dir__() -> list[str]:
        return __all__
