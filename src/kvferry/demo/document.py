"""The document, the questions, and the prompts made of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvferry.engine import model as engine_model
from kvferry.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

QUESTIONS = (
    "When is the finally clause executed?",
    "What does the with statement do?",
    "What happens if an exception is not handled?",
    "Which statement raises an exception?",
    "What does the assert statement do?",
    "What does the import statement do?",
)
"""Asked about the default document, in this order."""

ANY_TEXT_QUESTIONS = (
    "What is this text about?",
    "What does the text begin with?",
    "Which point of the text matters most?",
    "Who is the text for?",
)
"""Asked about a document of the user's own."""

_TOPICS = (
    "with", "try", "raise", "assert", "import", "class", "function", "for", "yield", "return",
    "calls", "naming", "execmodel", "types",
)  # fmt: skip


def default_document() -> str:
    """Chapters of the Python reference, which come with every CPython.

    Raises:
        ConfigError: this Python has no `pydoc_data`.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise ConfigError(
            "this Python comes without pydoc_data; pass a text with --document FILE"
        ) from error
    return "\n\n".join(topics[name].strip() for name in _TOPICS if name in topics)


def load_tokenizer(model_dir: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a model directory.

    Raises:
        ConfigError: the directory has no model or no tokenizer.
    """
    if not (model_dir / "config.json").is_file():
        raise ConfigError(f"{model_dir} is not a model directory: it has no config.json")
    tokenizer: PreTrainedTokenizerBase | None = engine_model.load_tokenizer(model_dir)
    if tokenizer is None:
        raise ConfigError(f"{model_dir} has no tokenizer")
    return tokenizer


def make_prompts(
    tokenizer: PreTrainedTokenizerBase, text: str, num_tokens: int, questions: Sequence[str]
) -> list[list[int]]:
    """One prompt per question: document first, question last, so that they start alike.

    Args:
        tokenizer: of the model; its chat template is used if it has one.
        text: the document.
        num_tokens: the document is cut to this many tokens.
        questions: at least one.

    Raises:
        ConfigError: the document is shorter than that.
    """
    token_ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    if len(token_ids) < num_tokens:
        raise ConfigError(
            f"the document has {len(token_ids)} tokens, --document-tokens asks for {num_tokens}; "
            "give a longer one, or ask for less"
        )
    document = str(tokenizer.decode(token_ids[:num_tokens]))
    return [
        engine_model.encode_message(
            tokenizer,
            f"Read this text.\n\n{document}\n\n"
            f"Question about the text: {question} Answer in one short sentence.",
        )
        for question in questions
    ]
