"""A tokenizer and a chat template as files: loaded, checked, and their digest. Nothing is fetched."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from hsjournal.errors import PromptsError
from hsjournal.prompts.refusal import shorten

_VOCABULARIES = ("tokenizer.json", "*.model", "vocab.json", "vocab.txt", "*.tiktoken", "tekken.json")
_TOKENIZER_FILES = (
    *_VOCABULARIES, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "merges.txt", "chat_template.*",
    "additional_chat_templates/*.jinja", "tokenization_*.py", "tool_declaration_*.py",
)  # fmt: skip


def tokenizer_digest(folder: Path) -> str:
    """SHA-256 over names, sizes and contents of all files that a tokenizer and its template are made of."""
    digest = hashlib.sha256()
    for path in sorted({p for pattern in _TOKENIZER_FILES for p in folder.glob(pattern) if p.is_file()}):
        data = path.read_bytes()
        digest.update(f"{path.relative_to(folder)}\0{len(data)}\0".encode("utf-8", "surrogateescape"))
        digest.update(data)
    return digest.hexdigest()


def load_tokenizer(folder: Path, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer in ``folder``, as transformers makes it.

    Args:
        folder: the model's folder.
        trust_remote_code: run Python code of the folder if the tokenizer needs it.

    Raises:
        PromptsError: when the folder holds no tokenizer that can be read.
    """
    if not folder.is_dir():
        raise PromptsError(
            f"there is no model folder {folder}", remedy="Name the folder that holds the model's tokenizer."
        )
    if not any(p.is_file() for pattern in _VOCABULARIES for p in folder.glob(pattern)):
        # transformers would make an empty tokenizer up from the model's type
        raise PromptsError(
            f"{folder} holds no tokenizer (no tokenizer.json or the like)",
            remedy="Put the model's tokenizer files there, or bring rows of `input_ids` and `loss_mask`.",
        )
    from transformers import AutoTokenizer  # takes seconds, and rows of token ids don't need it

    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=trust_remote_code)
    except Exception as error:  # the tokenizers library raises bare Exception
        remedy = "Check the folder's tokenizer files against their source."
        if not trust_remote_code and "trust_remote_code" in str(error):
            remedy = "It is made by Python code in the folder; read that, then allow it with --trust-remote-code."
        raise PromptsError(
            f"the tokenizer in {folder} can't be read: {shorten(f'{type(error).__name__}: {error}')}", remedy=remedy
        ) from error


def read_template(file: Path) -> str:
    """A chat template from a file: Jinja text, or JSON with a ``chat_template`` (as tokenizer_config.json has it).

    Raises:
        PromptsError: when it can't be read, or is no Jinja.
    """
    from jinja2 import TemplateSyntaxError

    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise PromptsError(
            f"the chat template {file} can't be read: {error.strerror}", remedy="Check the path (--chat-template)."
        ) from None
    except UnicodeDecodeError as error:
        raise PromptsError(f"the chat template {file} is not UTF-8: {error.reason}", remedy="Convert it.") from None
    if file.suffix == ".json":
        text = _from_json(file, text)
    if not text.strip():
        raise PromptsError(f"the chat template {file} is empty", remedy="Name another with --chat-template.")
    try:
        _compile(text)
    except TemplateSyntaxError as error:
        raise PromptsError(
            f"the chat template {file} is no Jinja: {error.message} (line {error.lineno})",
            remedy="Name a file of Jinja, or a JSON file with a `chat_template`.",
        ) from None
    return text


def _from_json(file: Path, text: str) -> str:
    try:
        found = json.loads(text)
        template = found["chat_template"]
    except (ValueError, TypeError, KeyError):
        template = None
    if not isinstance(template, str):
        raise PromptsError(f"{file} has no `chat_template` of text", remedy="Name a file of Jinja.")
    return template


def _compile(text: str) -> None:
    from transformers.utils.chat_template_utils import _compile_jinja_template

    _compile_jinja_template(text)
