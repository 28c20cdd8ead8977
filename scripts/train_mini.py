"""Train `mini`, the embedded model: GPT-2's architecture at 4.5 M parameters, on storybook English.

It takes about an hour on two cores, can be killed at any moment, and goes on from its checkpoint.
Everything is seeded: the document order, the windows, the initial weights and dropout. Workers are
processes of one thread that split each step's sequences and add up their gradients: unlike threads
that meet at barriers inside every operation, they are hardly slowed by a busy neighbour.

    python scripts/train_mini.py --work build/mini            # train, or go on
    python scripts/export_mini.py --work build/mini           # ship what was trained

The model here is for training only (dropout, autograd); inference is `nanoserve.model.gpt2`, and a
test holds the two to the same held-out loss.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing
import torch.nn.functional as F
from mini_corpus import REPEATS, Document, load_documents
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn

SEED = 1804
VOCAB_SIZE, CONTEXT, LAYERS, HEADS, WIDTH = 4096, 1024, 4, 4, 256
EOT = VOCAB_SIZE - 1
SEQUENCES_PER_STEP = 8
DROPOUT = 0.1
ADAM_LR, MUON_LR, WEIGHT_DECAY = 1.5e-3, 3.5e-3, 0.1
WARMUP_STEPS = 100
LOG_EVERY, EVAL_EVERY, SAVE_EVERY = 10, 100, 50


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
        return F.cross_entropy(
            logits.view(-1, VOCAB_SIZE), targets.reshape(-1), reduction=reduction
        )


def encode(tokenizer: Tokenizer, documents: list[Document]) -> list[list[int]]:
    return [[*e.ids, EOT] for e in tokenizer.encode_batch([d.text for d in documents])]


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
    path.with_suffix(".tmp").replace(path)


def add_up_gradients(model: nn.Module) -> None:
    """Every worker's gradients become the sum over all workers."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    flat = torch.cat([g.flatten() for g in gradients])
    dist.all_reduce(flat)
    for gradient, total in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(total.view_as(gradient))


def load_checkpoint(
    path: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer], steps: int
) -> int:
    """Restore what was saved; the step to go on with, 0 where nothing was."""
    if not path.exists():
        return 0
    state = torch.load(path, weights_only=True)
    if state["steps"] != steps:
        raise ValueError(f"{path} was trained for --steps {state['steps']}, got {steps}")
    model.load_state_dict(state["model"])
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    return int(state["step"])


def train_step(model: TrainingGPT2, rows: Tensor, worker: int, workers: int) -> float:
    """Gradients of the whole step on every worker; its mean loss."""
    total = torch.zeros(1)
    for part in rows[worker::workers].split(1):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(part[:, :-1], part[:, 1:]) / len(rows)
        loss.backward()
        total += loss.detach()
    add_up_gradients(model)
    dist.all_reduce(total)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return total.item()


def train(worker: int, workers: int, work: Path, corpus: Path, steps: int) -> None:
    torch.set_num_threads(1)
    rendezvous = f"file://{work.resolve()}/rendezvous"
    dist.init_process_group("gloo", init_method=rendezvous, rank=worker, world_size=workers)
    train_documents, held_out = load_documents(corpus)
    tokenizer = Tokenizer.from_file(str(work / "tokenizer.json"))
    encoded, books = encode(tokenizer, train_documents), [d.book for d in train_documents]
    encoded_held_out = encode(tokenizer, held_out)

    torch.manual_seed(SEED)
    model = TrainingGPT2()
    optimizers = make_optimizers(model)
    peaks = [[g["lr"] for g in o.param_groups] for o in optimizers]
    first_step = load_checkpoint(work / "checkpoint.pt", model, optimizers, steps)
    started, source = time.perf_counter(), batches(encoded, books, first_step)
    for step in range(first_step, steps):
        torch.manual_seed(SEED + step * workers + worker)  # of dropout
        share = learning_rate(step, steps)
        for optimizer, rates in zip(optimizers, peaks, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * share
        train_loss = train_step(model, next(source), worker, workers)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        done = step + 1
        if worker == 0 and (done % LOG_EVERY == 0 or done == steps):
            entry = {"step": done, "train_loss": round(train_loss, 4)}
            if done % EVAL_EVERY == 0 or done == steps:
                losses = held_out_losses(model, encoded_held_out)
                entry["held_out_loss"] = round(losses.mean().item(), 4)
            num_tokens = (done - first_step) * SEQUENCES_PER_STEP * CONTEXT
            entry["tokens_per_s"] = round(num_tokens / (time.perf_counter() - started))
            with (work / "log.jsonl").open("a") as log:
                print(json.dumps(entry), file=log)
            print(json.dumps(entry), flush=True)
        if worker == 0 and (done % SAVE_EVERY == 0 or done == steps):
            optimizer_states = [o.state_dict() for o in optimizers]
            state = {"model": model.state_dict(), "optimizers": optimizer_states}
            save_checkpoint(work / "checkpoint.pt", state | {"step": done, "steps": steps})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--work", type=Path, required=True, help="checkpoint, tokenizer and log")
    parser.add_argument("--corpus", type=Path, help="folder of the archives (default: WORK/corpus)")
    parser.add_argument("--steps", type=int, default=2400)
    parser.add_argument("--workers", type=int, default=2, help="processes of one thread each")
    options = parser.parse_args()
    work, corpus = options.work, options.corpus or options.work / "corpus"
    work.mkdir(parents=True, exist_ok=True)
    (work / "rendezvous").unlink(missing_ok=True)
    if not (work / "tokenizer.json").exists():
        train_tokenizer(load_documents(corpus)[0]).save(str(work / "tokenizer.json"))
    arguments = (options.workers, work, corpus, options.steps)
    torch.multiprocessing.spawn(train, arguments, nprocs=options.workers)


if __name__ == "__main__":
    main()
