"""What is asked of an engine under test: prompts that are the same on every machine.

Token ids are drawn from the model's vocabulary by a seeded generator. How long a step takes does
not depend on which tokens it holds, and a prompt that differs per sequence can share no prefix.
"""

from __future__ import annotations

import random

PROMPT_SEED = 20_190_214  # the day GPT-2 was published


def prompt_token_ids(length: int, vocab_size: int, sequence: int = 0) -> list[int]:
    """`length` ids; a prefix of any longer prompt of the same `sequence`, so contexts nest."""
    generator = random.Random(f"{PROMPT_SEED}:{sequence}")
    # the last id is end-of-text in GPT-2's own vocabulary, which is never in a prompt
    return [generator.randrange(vocab_size - 1) for _ in range(length)]
