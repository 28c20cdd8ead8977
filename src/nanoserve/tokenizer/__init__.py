"""Text to token ids and back: GPT-2's byte-level BPE, and the other tokenizers its family ships.

Splitting text into tokens is the work of the `tokenizers` library (or of `sentencepiece`). The way
back is done here alone: a token spells fixed bytes, a text is the bytes of its tokens in a row, and
bytes that are not UTF-8 become U+FFFD by Python's rule. So a whole text and a stream of its tokens
cannot disagree, and no half character is ever shown. One exception is part of the rule: where
vocabularies mark words by a space before them, the first token of a text has none.

Floor 1: no torch, no transformers. Whatever is wrong with a tokenizer's files is a ValueError that
names the file.
"""

from nanoserve.tokenizer.loading import SENTENCEPIECE_FILES
from nanoserve.tokenizer.tokenizer import StreamDecoder, Tokenizer
from nanoserve.tokenizer.vocabulary import END_OF_TEXT

__all__ = ["END_OF_TEXT", "SENTENCEPIECE_FILES", "StreamDecoder", "Tokenizer"]
