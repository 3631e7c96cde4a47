"""What an engine keeps of a request on the host, and which requests it takes."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from dsa_jax.checks import require
from dsa_jax.config import DsaConfig
from dsa_jax.pages import Lease
from dsa_jax.sampling import Sampling

Finish = Literal["length", "stop", "cancelled"]
OnToken = Callable[[int, int], None]  # the request's id, the token


@dataclasses.dataclass(frozen=True)
class Output:
    """What has become of a request.

    tokens: i32[new tokens], the stop token included.
    finish: "length" (max_new_tokens are there), "stop" (a stop token), "cancelled"; None while it runs.
    prompt_tokens: tokens of the prompt. reused: of these, those whose keys another request had written.
    verified: steps that verified drafts. accepted: drafts that were right in these steps.
    """

    tokens: np.ndarray
    finish: Finish | None
    prompt_tokens: int
    reused: int
    verified: int
    accepted: int

    @property
    def acceptance_length(self) -> float:
        """Tokens a verified step gave, 1 to 1 + drafts; 1 where there was none."""
        return 1.0 + self.accepted / max(self.verified, 1)


@dataclasses.dataclass(eq=False)
class Request:
    """A request that waits or runs.

    text: i32[limit], the prompt and what was written after it, `length` tokens so far.
    written: tokens whose keys are in the caches for good.
    drafted: guesses of the tokens after `length`.
    slot: its place in the batch, where it runs. It then holds the pages of `lease`.
    """

    id: int
    text: np.ndarray
    prompt_tokens: int
    sampling: Sampling
    stop: frozenset[int]
    drafts: int
    on_token: OnToken | None
    lease: Lease
    length: int
    written: int = 0
    slot: int = -1
    drafted: tuple[int, ...] = ()
    finish: Finish | None = None
    reused: int = 0
    verified: int = 0
    accepted: int = 0

    @property
    def limit(self) -> int:
        """The length that it may reach."""
        return len(self.text)

    @property
    def decodes(self) -> bool:
        """Whether all but its last token are in the caches."""
        return self.written == self.length - 1

    def append(self, tokens: list[int]) -> list[int]:
        """Adds new tokens up to the one that ends it; returns those that were added."""
        before = self.length
        for token in tokens:
            self.text[self.length] = token
            self.length += 1
            if token in self.stop or self.length == self.limit:
                self.finish = "stop" if token in self.stop else "length"
                break
        self.written = self.length - 1
        return self.text[before : self.length].tolist()

    def output(self) -> Output:
        return Output(
            tokens=self.text[self.prompt_tokens : self.length].copy(),
            finish=self.finish,
            prompt_tokens=self.prompt_tokens,
            reused=self.reused,
            verified=self.verified,
            accepted=self.accepted,
        )


def check_prompt(config: DsaConfig, name: str, prompt: Any) -> np.ndarray:
    """The prompt as an int32 array. Raises ValueError unless it is 1-D and of at least one of the model's tokens."""
    prompt = np.asarray(prompt)
    shape, vocab = f"shape {list(prompt.shape)}", config.vocab_size
    require(prompt.ndim == 1 and prompt.size > 0, name, shape, "a 1-D array of at least one token")
    require(np.issubdtype(prompt.dtype, np.integer), f"{name}'s dtype", prompt.dtype, "an integer type")
    outside = prompt[(prompt < 0) | (prompt >= vocab)]
    require(outside.size == 0, f"{name}'s tokens", outside[:1].tolist(), f"in 0..{vocab - 1}")
    return prompt.astype(np.int32)


def check_length(name: str, prompt: np.ndarray, max_new_tokens: int, limit: int, what: str) -> None:
    """Raises ValueError unless prompt and max_new_tokens together are at most `limit`, which the error calls `what`."""
    require(max_new_tokens >= 1, "max_new_tokens", max_new_tokens, "at least 1")
    length = f"{len(prompt)} + {max_new_tokens}"
    require(
        len(prompt) + max_new_tokens <= limit, f"{name}'s length + max_new_tokens", length, f"at most {what} = {limit}"
    )
