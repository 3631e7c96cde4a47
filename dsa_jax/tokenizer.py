"""Text to token ids and back: a checkpoint's tokenizer.json where it has one, else the bytes of the text."""

from pathlib import Path
from typing import Any

import numpy as np

from dsa_jax.checks import require


class ByteTokenizer:
    """One token a byte of UTF-8. Bytes that are no text decode to U+FFFD."""

    name = "bytes"

    def __init__(self, vocab_size: int):
        """Raises ValueError unless every byte is a token."""
        require(vocab_size >= 256, "vocab_size", vocab_size, "at least 256 to read bytes: there is no tokenizer.json")

    def encode(self, text: str) -> np.ndarray:
        """i32[T], the tokens of a text."""
        # surrogateescape: a file that is not UTF-8 is read, and comes back, byte for byte.
        return np.frombuffer(text.encode("utf-8", "surrogateescape"), np.uint8).astype(np.int32)

    def decode(self, tokens: np.ndarray) -> str:
        return bytes(int(token) for token in tokens if token < 256).decode("utf-8", errors="replace")


class FileTokenizer:
    """A tokenizer.json, read by the tokenizers library; encoding adds the special tokens that the file says to add."""

    def __init__(self, path: Path):
        """Raises ValueError if the file is no tokenizer."""
        import tokenizers

        self.name = path.name
        try:
            self._tokenizer: Any = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exceptions
            raise ValueError(f"{path} is not a tokenizer: {error}") from error

    def encode(self, text: str) -> np.ndarray:
        return np.array(self._tokenizer.encode(text).ids, np.int32)

    def decode(self, tokens: np.ndarray) -> str:
        return self._tokenizer.decode([int(token) for token in tokens], skip_special_tokens=False)


Tokenizer = ByteTokenizer | FileTokenizer


def load_tokenizer(checkpoint: str | Path, vocab_size: int) -> Tokenizer:
    """The tokenizer of a checkpoint's directory.

    Raises ValueError for a bad file, and without a file for a `vocab_size` below 256.
    """
    file = Path(checkpoint) / "tokenizer.json"
    return FileTokenizer(file) if file.is_file() else ByteTokenizer(vocab_size)
