"""Text to token ids and back, as the model's own file says.

Owns vocabularies, special tokens, the incremental detokenizer and chat rendering; the merging is the `tokenizers`
library's. Text is rebuilt from the *bytes* of tokens and never by decoding them anew, so a stream of pieces joins to
exactly the text of the whole, and half a character is held back until its rest arrives.
"""

from __future__ import annotations

import codecs
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers

from octavo.errors import InvalidRequest, ModelError

if TYPE_CHECKING:
    from octavo.models.chat_template import ChatTemplate

_log = logging.getLogger(__name__)

END_OF_TURN = {
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<end_of_turn>", "<EOT>",
}  # fmt: skip
"""Control tokens that end an answer even where the file names another as the end."""


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte (openai/gpt-2, encoder.py, `bytes_to_unicode`), inverted."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_level_alphabet()


class Tokenizer:
    """One model's tokenizer.

    bos_token_id: the begin-of-text token, if the file has one; add_bos: whether `encode` puts it in front.
    eos_token_ids: every token that ends an answer, the file's own first.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        pieces: Sequence[str],
        *,
        control: Iterable[int],
        verbatim: Iterable[int],
        byte_level: bool,
        space_prefix: bool,
        bos_token_id: int | None,
        eos_token_ids: Sequence[int],
        add_bos: bool,
        templates: Mapping[str, str],
    ) -> None:
        self._backend, self._pieces = backend, pieces
        self._control, self._verbatim = frozenset(control), frozenset(verbatim)
        self._byte_level, self.space_prefix = byte_level, space_prefix
        self.bos_token_id, self.add_bos = bos_token_id, add_bos and bos_token_id is not None
        ends = sorted(token for token in self._control if pieces[token] in END_OF_TURN)
        self.eos_token_ids = tuple(dict.fromkeys([*eos_token_ids, *ends]))
        self._sources = dict(templates)
        self._templates: dict[str, ChatTemplate] = {}  # those that were used
        self._bytes: dict[int, bytes] = {}

    @property
    def vocab_size(self) -> int:
        return len(self._pieces)

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Token ids; special tokens written out in `text` are taken as such.

        With `add_special` the begin-of-text token comes first if the model's file asks for it, and only once.
        (A file's wish for an end token is ignored: a prompt is to be continued.)
        """
        try:
            [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=False)  # other threads may run
        except (UnicodeEncodeError, TypeError) as error:
            raise InvalidRequest("prompt", f"is not valid Unicode text: {error}") from error
        ids: list[int] = encoding.ids
        if add_special and self.add_bos and ids[:1] != [self.bos_token_id]:
            assert self.bos_token_id is not None
            ids.insert(0, self.bos_token_id)
        return ids

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of the tokens, U+FFFD where their bytes are not UTF-8; special tokens are left out unless asked for."""
        text = self.detokenizer((), skip_special)
        return text.push(ids) + text.flush()

    def token_text(self, token: int) -> str:
        """One token by itself, for display: half a character shows as U+FFFD."""
        return self.token_bytes(token).decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token stands for; none for ids beyond the vocabulary (padding rows of the embedding)."""
        if (known := self._bytes.get(token)) is None:
            known = self._bytes[token] = self._find_bytes(token) if 0 <= token < len(self._pieces) else b""
        return known

    def is_special(self, token: int) -> bool:
        """Whether the token is a mark, such as the end of a turn, and not text."""
        return token in self._control

    def detokenizer(self, prompt_ids: Sequence[int] = (), skip_special: bool = True) -> Detokenizer:
        """The text of what follows `prompt_ids`, piece by piece."""
        return Detokenizer(self, prompt_ids, skip_special)

    def chat_template(self, tools: bool = False) -> str | None:
        """The source of the template for a conversation, with tools or without; None if the model has none."""
        template = self._template(tools)
        return None if template is None else template.source

    def set_chat_template(self, source: str) -> None:
        """Use this template in place of the model's own, with tools and without."""
        self._sources, self._templates = {"default": source}, {}

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Any] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The conversation as the model was trained to see it; `variables` are further names for the template.

        Raises InvalidRequest("messages") for a malformed conversation or one that the template refuses.
        """
        template = self._template(bool(tools))
        if template is None:
            raise InvalidRequest("messages", "the model has no chat template: send a prompt to /v1/completions instead")
        names = {"bos_token": self.bos_token_id, "eos_token": self.eos_token_ids[0] if self.eos_token_ids else None}
        marks = {name: "" if token is None else self._pieces[token] for name, token in names.items()}
        conversation = {
            "messages": [_plain(message) for message in _conversation(messages)],
            "add_generation_prompt": add_generation_prompt,
            "tools": list(tools) if tools else None,
        }
        return template.render({**marks, "documents": None, **(variables or {}), **conversation})

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Any] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of `render_chat`, with exactly one begin-of-text token in front where the model uses one."""
        return self.encode(self.render_chat(messages, add_generation_prompt, tools, variables))

    def _template(self, tools: bool) -> ChatTemplate | None:
        name = "tool_use" if tools and "tool_use" in self._sources else "default"
        if name in self._sources and name not in self._templates:
            from octavo.models.chat_template import ChatTemplate  # brings Jinja with it, which a prompt does without

            self._templates[name] = ChatTemplate(self._sources[name])
        return self._templates.get(name)

    def _find_bytes(self, token: int) -> bytes:
        piece = self._pieces[token]
        if token in self._verbatim:
            return piece.encode()
        if self._byte_level:
            try:
                return bytes([_BYTE_OF[char] for char in piece])
            except KeyError:
                return piece.encode()  # outside the alphabet: a token that was added as plain text
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            try:
                return bytes([int(piece[3:5], 16)])
            except ValueError:
                pass  # not a byte after all
        return piece.replace("▁", " ").encode()


class Detokenizer:
    """Turns tokens into text as they come. What `push` and `flush` return joins to the text that follows the prompt.

    A prompt may end inside a character: if the first bytes pushed complete it, the character is emitted whole.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special: bool) -> None:
        self._tokenizer, self._skip_special = tokenizer, skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._unfinished = _unfinished_character(self._bytes_before(prompt_ids))
        self._at_start = tokenizer.space_prefix and len(prompt_ids) == 0  # of a text: its first space is not part of it

    def push(self, ids: Sequence[int]) -> str:
        """The characters that are complete once `ids` have followed."""
        data = b"".join(map(self._bytes_of, ids))
        if not data:
            return ""
        if self._unfinished:
            if _unfinished_character(self._unfinished + data[:1]) or _is_character(self._unfinished + data[:1]):
                data = self._unfinished + data
            self._unfinished = b""
        if self._at_start:
            self._at_start = False
            data = data.removeprefix(b" ")
        return self._decoder.decode(data)

    def flush(self) -> str:
        """U+FFFD if the text ends inside a character, else nothing."""
        return self._decoder.decode(b"", final=True)

    def _bytes_of(self, token: int) -> bytes:
        skipped = self._skip_special and self._tokenizer.is_special(token)
        return b"" if skipped else self._tokenizer.token_bytes(token)

    def _bytes_before(self, prompt_ids: Sequence[int]) -> bytes:
        """The last bytes of the prompt, at least four if it has as many."""
        tail = b""
        for token in reversed(prompt_ids):
            tail = self._bytes_of(token) + tail
            if len(tail) >= 4:
                break
        return tail


def _unfinished_character(data: bytes) -> bytes:
    """The bytes at the end of `data` that begin a UTF-8 character and lack its rest."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(data)
    return decoder.getstate()[0]


def _is_character(data: bytes) -> bool:
    try:
        return len(data.decode()) == 1
    except UnicodeDecodeError:
        return False


def _conversation(messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence) or not messages:
        raise InvalidRequest("messages", "must be a list of at least one message")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InvalidRequest("messages", f"message {i} must be an object with a role")
    return messages


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with its text parts, if it has a list of them, joined to the one text that templates expect."""
    content = message.get("content")
    if not isinstance(content, list):
        return dict(message)
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise InvalidRequest("messages", "content parts must be of type text: the model reads nothing else")
    return {**message, "content": "".join(part["text"] for part in content)}


# ── from GGUF metadata ───────────────────────────────────────────────────────────────────────────────────────────

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTION}|{_LETTERS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTION}|{_LETTERS}|\p{{N}}|{_REST}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
_CASED_REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = rf"{_CASED % ('', '')}|\p{{N}}|{_CASED_REST}"
_GPT4O = rf"{_CASED % (_CONTRACTION + '?', _CONTRACTION + '?')}|\p{{N}}{{1,3}}|{_CASED_REST}"
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PRE: dict[str, list[str]] = {
    "gpt-2 phi-2 olmo mpt jais exaone4 gigachat a.x-4.0 trillion": [_GPT2],
    "smollm starcoder refact command-r codeshell exaone minerva-7b": [r"\p{N}", _GPT2],
    "llama3 llama-v3 llama-bpe falcon3 smaug-bpe dbrx glm4 chatglm-bpe": [_LLAMA3],
    "qwen2 deepseek-r1-qwen stablelm2 megrez kormo hunyuan": [_QWEN2],
    "tekken": [_TEKKEN],
    "gpt-4o llama4": [_GPT4O],
    "deepseek-coder": [r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}"],
    "deepseek-v3": [r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _DEEPSEEK3],
    "falcon": [r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]"],
    "default": [r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"],
}
_PRE = {name: patterns for names, patterns in _PRE.items() for name in names.split()}
"""What `tokenizer.ggml.pre` stands for: text is split by each expression in turn (llama.cpp, src/llama-vocab.cpp)."""
_WHOLE_WORDS = {"llama3", "llama-v3", "llama-bpe", "falcon3", "tekken"}
"""A word that is itself a token is taken whole, whatever the merges say; and these models begin with BOS."""
_NFC = {"qwen2", "deepseek-r1-qwen"}
"""The original tokenizers compose characters first; llama.cpp does not."""

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4


def from_gguf(meta: Mapping[str, Any], path: Path) -> Tokenizer:
    """A tokenizer from a GGUF file's metadata. Raises ModelError."""
    kind, pieces = meta.get("tokenizer.ggml.model"), meta.get("tokenizer.ggml.tokens")
    if kind not in ("gpt2", "llama"):
        raise ModelError(path, f"has a tokenizer of the kind {kind!r}, which is not supported (gpt2 and llama are)")
    if not _all(str, pieces) or not pieces:
        raise ModelError(path, "has no tokenizer.ggml.tokens")
    vocabulary = {piece: token for token, piece in enumerate(pieces)}
    if len(vocabulary) < len(pieces):
        twice = next(piece for token, piece in enumerate(pieces) if vocabulary[piece] != token)
        raise ModelError(path, f"has the token {twice!r} twice")
    types = meta.get("tokenizer.ggml.token_type", [_NORMAL] * len(pieces))
    if not _all(int, types) or len(types) != len(pieces):
        raise ModelError(path, f"needs {len(pieces)} whole numbers in tokenizer.ggml.token_type")

    def token_id(name: str) -> int | None:
        token = meta.get(f"tokenizer.ggml.{name}_token_id")
        if token is not None and (not isinstance(token, int) or not 0 <= token < len(pieces)):
            raise ModelError(path, f"has tokenizer.ggml.{name}_token_id {token!r}, but {len(pieces)} tokens")
        return token

    if kind == "gpt2":
        pre = meta.get("tokenizer.ggml.pre")
        backend = _byte_level_backend(vocabulary, meta.get("tokenizer.ggml.merges"), pre, path)
        add_bos, space_prefix = pre in _WHOLE_WORDS, False
    else:
        space_prefix = bool(meta.get("tokenizer.ggml.add_space_prefix", True))
        scores = meta.get("tokenizer.ggml.scores")
        backend = _sentencepiece_backend(vocabulary, scores, types, token_id("unknown"), space_prefix, path)
        add_bos = True
    control, user_defined, unknown = (
        [token for token, sort in enumerate(types) if sort == wanted] for wanted in (_CONTROL, _USER_DEFINED, _UNKNOWN)
    )
    backend.add_special_tokens([AddedToken(pieces[token], normalized=False) for token in control if pieces[token]])
    backend.add_tokens([AddedToken(pieces[token], normalized=False) for token in user_defined if pieces[token]])
    keys = {"default": "tokenizer.chat_template", "tool_use": "tokenizer.chat_template.tool_use"}
    templates = {name: meta.get(key) for name, key in keys.items()}
    ends = [token_id("eos"), token_id("eot"), token_id("eom")]
    return Tokenizer(
        backend,
        pieces,
        control=control,
        verbatim=[*control, *user_defined, *unknown],
        byte_level=kind == "gpt2",
        space_prefix=space_prefix,
        bos_token_id=token_id("bos"),
        eos_token_ids=[token for token in ends if token is not None],
        add_bos=bool(meta.get("tokenizer.ggml.add_bos_token", add_bos)),
        templates={name: source for name, source in templates.items() if isinstance(source, str)},
    )


def _all(kind: type, values: Any) -> bool:
    return isinstance(values, list) and all(map(kind.__instancecheck__, values))


def _byte_level_backend(vocabulary: dict[str, int], merges: Any, pre: Any, path: Path) -> tokenizers.Tokenizer:
    if not _all(str, merges):
        raise ModelError(path, "has no tokenizer.ggml.merges")
    if pre is None or pre == "default":
        _log.warning(
            "%s does not say how its tokenizer splits words (tokenizer.ggml.pre is %s): text is split as llama.cpp's "
            "default does, which may not be how the model was trained. Use a file converted anew.",
            path, "absent" if pre is None else "'default'",
        )  # fmt: skip
        pre = "default"
    if pre not in _PRE:
        known = ", ".join(_PRE)
        raise ModelError(path, f"has tokenizer.ggml.pre {pre!r}, whose way to split words is not known (of {known})")
    splits = [merge.partition(" ") for merge in merges]
    backend = _bpe(path, vocabulary, [(left, right) for left, _, right in splits], ignore_merges=pre in _WHOLE_WORDS)
    if pre in _NFC:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _PRE[pre]]
        + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    return backend


def _sentencepiece_backend(
    vocabulary: dict[str, int], scores: Any, types: list[int], unknown: int | None, space_prefix: bool, path: Path
) -> tokenizers.Tokenizer:
    """SentencePiece's BPE: of all pairs that join to a token, the one with the best score is merged first.

    The list of merges is that of Transformers' `generate_merges` (convert_slow_tokenizer.py).
    """
    if not _all(float, scores) or len(scores) != len(vocabulary):
        raise ModelError(path, f"needs {len(vocabulary)} numbers in tokenizer.ggml.scores")
    ranked = []
    for piece, token in vocabulary.items():
        if types[token] == _NORMAL:
            splits = ((piece[:cut], piece[cut:]) for cut in range(1, min(len(piece), 256)))
            pairs = [(left, right) for left, right in splits if left in vocabulary and right in vocabulary]
            pairs.sort(key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
            ranked += [(scores[token], left, right) for left, right in pairs]
    ranked.sort(key=lambda merge: (-merge[0], -len(merge[1]), -len(merge[2])))
    merges = [(left, right) for _, left, right in ranked]
    unknown_piece = None if unknown is None else list(vocabulary)[unknown]
    backend = _bpe(path, vocabulary, merges, unk_token=unknown_piece, fuse_unk=True, byte_fallback=True)
    replace = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace]) if space_prefix else replace
    return backend


def _bpe(path: Path, vocabulary: dict[str, int], merges: list[tuple[str, str]], **options: Any) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges, **options))
    except Exception as error:  # the library raises nothing more precise
        raise ModelError(path, f"its tokenizer's merges do not fit its tokens: {error}") from error


# ── from a folder with tokenizer.json ────────────────────────────────────────────────────────────────────────────


def from_folder(path: Path) -> Tokenizer:
    """A tokenizer from tokenizer.json and the configuration files beside it. Raises ModelError."""
    file = path / "tokenizer.json"
    if not file.exists():
        raise ModelError(path, "has no tokenizer.json: only tokenizers in that format are supported")
    try:
        text = file.read_text("utf-8")
        backend, layout = tokenizers.Tokenizer.from_str(text), json.loads(text)
    except Exception as error:  # the library raises nothing more precise
        raise ModelError(file, f"is not a tokenizer: {error}") from error
    settings, generation, model = (
        _read_object(path / name) for name in ("tokenizer_config.json", "generation_config.json", "config.json")
    )
    pieces = [""] * (max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1)
    for piece, token in backend.get_vocab(with_added_tokens=True).items():
        pieces[token] = piece
    added = backend.get_added_tokens_decoder()

    def token_id(name: str) -> int | None:
        piece = settings.get(f"{name}_token")
        if isinstance(piece, dict):
            piece = piece.get("content")
        return backend.token_to_id(piece) if isinstance(piece, str) else None

    ends: list[int] = []
    for source in (generation, model):
        value = source.get("eos_token_id")
        ends += value if isinstance(value, list) else [] if value is None else [value]
    if (eos := token_id("eos")) is not None:
        ends.append(eos)
    if any(type(end) is not int or not 0 <= end < len(pieces) for end in ends):
        raise ModelError(path, f"has eos_token_id {ends!r}, but {len(pieces)} tokens")
    bos = token_id("bos")
    if bos is None and type(model.get("bos_token_id")) is int and 0 <= model["bos_token_id"] < len(pieces):
        bos = model["bos_token_id"]
    add_bos = settings.get("add_bos_token")
    if not isinstance(add_bos, bool):  # then the post-processor says
        add_bos = backend.encode("", add_special_tokens=True).ids[:1] == [bos]
    decoder = json.dumps(layout.get("decoder"))
    return Tokenizer(
        backend,
        pieces,
        control=[token for token, entry in added.items() if entry.special],
        verbatim=added,
        byte_level='"ByteLevel"' in decoder,
        space_prefix='"Strip"' in decoder or '"Metaspace"' in decoder,
        bos_token_id=bos,
        eos_token_ids=ends,
        add_bos=add_bos,
        templates=_templates(path, settings),
    )


def _templates(path: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name: a file of its own, one text, or a list of named ones."""
    if (file := path / "chat_template.jinja").exists():
        return {"default": file.read_text("utf-8", "replace")}
    source = settings.get("chat_template")
    if isinstance(source, str):
        return {"default": source}
    named = [entry for entry in source or [] if isinstance(entry, dict)]
    return {str(entry.get("name")): str(entry.get("template")) for entry in named}


def _read_object(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(path, f"cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(path, "must hold a JSON object")
    return value
