"""A small real tokenizer for model directories that have none."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedTokenizerFast

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers


def save_tiny_tokenizer(directory: Path, vocab_size: int = 320) -> None:
    """Write a byte-level BPE tokenizer, trained on a few words, to `directory`."""
    tokenizer = Tokenizer(models.BPE(unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    words = "the statement is executed when an exception of the try clause was raised " * 9
    tokenizer.train_from_iterator([words], trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(directory)
