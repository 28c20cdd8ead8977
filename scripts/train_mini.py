"""Train `mini`, the embedded model: GPT-2's architecture at 4.5 M parameters, on storybook English.

One run on a two-core machine takes about an hour and a half; it can be killed at any moment and goes on
from its last checkpoint. Everything is seeded: the document order, the windows, the initial weights
and dropout. Weights are exported in Hugging Face's GPT-2 layout, fp16.

    python scripts/train_mini.py --work build/mini            # train, or go on
    python scripts/train_mini.py --work build/mini --export src/nanoserve/models/mini

The model here is for training only (dropout, autograd); inference is `nanoserve.model.gpt2`, and a
test holds the two to the same held-out loss.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from mini_corpus import REPEATS, Document, load_documents
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn

SEED = 1804
VOCAB_SIZE, CONTEXT, LAYERS, HEADS, WIDTH = 4096, 1024, 4, 4, 256
EOT = VOCAB_SIZE - 1
SEQUENCES_PER_STEP, SEQUENCES_PER_PASS = 8, 1
DROPOUT = 0.1
ADAM_LR, MUON_LR, WEIGHT_DECAY = 1.5e-3, 3.5e-3, 0.1
WARMUP_STEPS = 100
EVAL_EVERY, SAVE_EVERY = 100, 50


def train_tokenizer(documents: list[Document]) -> Tokenizer:
    """Byte-level BPE in GPT-2's layout: 256 bytes, then merges, then `<|endoftext|>` last."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - 1,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [d.text for d in documents for _ in range(REPEATS.get(d.book, 1))]
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens(["<|endoftext|>"])
    assert tokenizer.token_to_id("<|endoftext|>") == EOT
    return tokenizer


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(WIDTH)
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH)
        self.attn_proj = nn.Linear(WIDTH, WIDTH)
        self.ln_2 = nn.LayerNorm(WIDTH)
        self.c_fc = nn.Linear(WIDTH, 4 * WIDTH)
        self.mlp_proj = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            t.view(batch, length, HEADS, WIDTH // HEADS).transpose(1, 2)
            for t in self.c_attn(self.ln_1(x)).split(WIDTH, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        mixed = mixed.transpose(1, 2).reshape(batch, length, WIDTH)
        x = x + F.dropout(self.attn_proj(mixed), DROPOUT, self.training)
        hidden = F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh")
        return x + F.dropout(self.mlp_proj(hidden), DROPOUT, self.training)


class TrainingGPT2(nn.Module):
    """GPT-2 with a tied head; `forward` gives the mean loss, or one loss a position."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCAB_SIZE, WIDTH)
        self.wpe = nn.Embedding(CONTEXT, WIDTH)
        self.h = nn.ModuleList(Block() for _ in range(LAYERS))
        self.ln_f = nn.LayerNorm(WIDTH)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                std = 0.02 / math.sqrt(2 * LAYERS) if "proj" in name else 0.02
                nn.init.normal_(parameter, std=std)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        x = F.dropout(x, DROPOUT, self.training)
        for block in self.h:
            x = block(x)
        logits = F.linear(self.ln_f(x), self.wte.weight)
        return F.cross_entropy(logits.view(-1, VOCAB_SIZE), targets.reshape(-1), reduction=reduction)


def encode(tokenizer: Tokenizer, documents: list[Document]) -> list[list[int]]:
    return [e.ids + [EOT] for e in tokenizer.encode_batch([d.text for d in documents])]


def windows(encoded: list[list[int]], books: list[str], epoch: int) -> Tensor:
    """[n, CONTEXT + 1] windows of one epoch: documents shuffled, cut at a random phase."""
    rng = random.Random(SEED + epoch)
    order = [i for i, book in enumerate(books) for _ in range(REPEATS.get(book, 1))]
    rng.shuffle(order)
    stream = [EOT] + [token for i in order for token in encoded[i]]
    stream = stream[rng.randrange(CONTEXT) :]
    count = (len(stream) - 1) // CONTEXT
    flat = torch.tensor(stream[: count * CONTEXT + 1])
    cut = torch.stack([flat[i * CONTEXT : (i + 1) * CONTEXT + 1] for i in range(count)])
    return cut[torch.tensor(rng.sample(range(count), count))]


def batches(encoded: list[list[int]], books: list[str], first_step: int) -> Iterator[Tensor]:
    """[SEQUENCES_PER_STEP, CONTEXT + 1], from `first_step` on, the same whether resumed or not."""
    step, epoch = 0, 0
    while True:
        cut = windows(encoded, books, epoch)
        for start in range(0, len(cut) - SEQUENCES_PER_STEP + 1, SEQUENCES_PER_STEP):
            if step >= first_step:
                yield cut[start : start + SEQUENCES_PER_STEP]
            step += 1
        epoch += 1


@torch.no_grad()
def held_out_losses(model: TrainingGPT2, encoded: list[list[int]]) -> Tensor:
    """[n, CONTEXT] nats a token over non-overlapping windows of the held-out documents."""
    model.eval()
    stream = torch.tensor([EOT] + [token for ids in encoded for token in ids])
    count = (len(stream) - 1) // CONTEXT
    rows = []
    for i in range(count):
        window = stream[i * CONTEXT : (i + 1) * CONTEXT + 1]
        rows.append(model(window[None, :-1], window[None, 1:], "none"))
    model.train()
    return torch.stack(rows)


def learning_rate(step: int, steps: int) -> float:
    """Share of the peak: linear warm-up, then a cosine down to nothing."""
    if step < WARMUP_STEPS:
        return (step + 1) / WARMUP_STEPS
    return 0.5 * (1 + math.cos(math.pi * (step - WARMUP_STEPS) / (steps - WARMUP_STEPS)))


def make_optimizers(model: TrainingGPT2) -> list[torch.optim.Optimizer]:
    """Muon on the matrices of the blocks, AdamW on embeddings, biases and norms."""
    matrices = [p for n, p in model.named_parameters() if n.startswith("h.") and p.ndim == 2]
    embeddings = [p for n, p in model.named_parameters() if not n.startswith("h.") and p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    return [
        torch.optim.Muon(
            matrices, lr=MUON_LR, weight_decay=WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(
            [
                {"params": embeddings, "weight_decay": WEIGHT_DECAY},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=ADAM_LR,
            betas=(0.9, 0.95),
            fused=True,
        ),
    ]


def save_checkpoint(path: Path, state: dict[str, object]) -> None:
    """Whole or not at all: a kill in the middle leaves the previous checkpoint."""
    torch.save(state, path.with_suffix(".tmp"))
    os.replace(path.with_suffix(".tmp"), path)


def train(work: Path, corpus: Path, steps: int, threads: int) -> None:
    torch.set_num_threads(threads)
    torch.manual_seed(SEED)
    train_documents, held_out = load_documents(corpus)
    work.mkdir(parents=True, exist_ok=True)
    tokenizer_path = work / "tokenizer.json"
    if not tokenizer_path.exists():
        train_tokenizer(train_documents).save(str(tokenizer_path))
    tokenizer = Tokenizer.from_file(str(tokenizer_path))
    encoded, books = encode(tokenizer, train_documents), [d.book for d in train_documents]
    encoded_held_out = encode(tokenizer, held_out)

    model = TrainingGPT2()
    optimizers = make_optimizers(model)
    peaks = [[g["lr"] for g in o.param_groups] for o in optimizers]
    first_step, path = 0, work / "checkpoint.pt"
    if path.exists():
        state = torch.load(path, weights_only=True)
        if state["steps"] != steps:
            raise ValueError(f"{path} was trained for --steps {state['steps']}, got {steps}")
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        torch.set_rng_state(state["rng"])
        first_step = state["step"]
    num_tokens = sum(len(e) * REPEATS.get(b, 1) for e, b in zip(encoded, books, strict=True))
    print(f"{num_tokens:,} training tokens an epoch, step {first_step} of {steps}", flush=True)

    started, source = time.perf_counter(), batches(encoded, books, first_step)
    log = (work / "log.jsonl").open("a")
    for step in range(first_step, steps):
        share = learning_rate(step, steps)
        for optimizer, rates in zip(optimizers, peaks, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * share
        total = 0.0
        for rows in next(source).split(SEQUENCES_PER_PASS):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(rows[:, :-1], rows[:, 1:])
            share_of_step = len(rows) / SEQUENCES_PER_STEP
            (loss * share_of_step).backward()
            total += loss.item() * share_of_step
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        done = step + 1
        if done % 10 == 0 or done == steps:
            entry = {"step": done, "train_loss": round(total, 4)}
            if done % EVAL_EVERY == 0 or done == steps:
                entry["held_out_loss"] = round(held_out_losses(model, encoded_held_out).mean().item(), 4)
            rate = (done - first_step) * SEQUENCES_PER_STEP * CONTEXT
            entry["tokens_per_s"] = round(rate / (time.perf_counter() - started))
            print(json.dumps(entry), file=log, flush=True)
            print(json.dumps(entry), flush=True)
        if done % SAVE_EVERY == 0 or done == steps:
            state = {
                "model": model.state_dict(),
                "optimizers": [o.state_dict() for o in optimizers],
                "rng": torch.get_rng_state(),
                "step": done,
                "steps": steps,
            }
            save_checkpoint(path, state)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--work", type=Path, required=True, help="checkpoint, tokenizer and log")
    parser.add_argument("--corpus", type=Path, help="folder of the archives (default: WORK/corpus)")
    parser.add_argument("--steps", type=int, default=2400)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    options = parser.parse_args()
    train(options.work, options.corpus or options.work / "corpus", options.steps, options.threads)


if __name__ == "__main__":
    main()
