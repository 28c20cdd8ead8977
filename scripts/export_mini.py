"""Ship `mini`: the trained checkpoint as a Hugging Face folder, its held-out text, its model card.

    python scripts/export_mini.py --work build/mini

The numbers of the card (template: mini_card.md) are measured here, through nanoserve's own engine,
on the fp16 weights as shipped.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from mini_corpus import ARCHIVES, load_documents
from safetensors.numpy import save_file
from train_mini import (
    ADAM_LR,
    CONTEXT,
    DROPOUT,
    EOT,
    HEADS,
    LAYERS,
    MUON_LR,
    SEED,
    SEQUENCES_PER_STEP,
    VOCAB_SIZE,
    WEIGHT_DECAY,
    WIDTH,
)

from nanoserve import LLM, SamplingParams

PACKAGE = Path(__file__).parents[1] / "src" / "nanoserve"
CONFIG = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "activation_function": "gelu_new",
    "vocab_size": VOCAB_SIZE,
    "n_positions": CONTEXT,
    "n_embd": WIDTH,
    "n_layer": LAYERS,
    "n_head": HEADS,
    "layer_norm_epsilon": 1e-5,
    "attn_pdrop": 0.0,
    "embd_pdrop": DROPOUT,
    "resid_pdrop": DROPOUT,
    "bos_token_id": EOT,
    "eos_token_id": EOT,
    "torch_dtype": "float16",
}
GENERATION_CONFIG = {
    "bos_token_id": EOT,
    "eos_token_id": EOT,
    "do_sample": True,
    "max_new_tokens": 128,
    "temperature": 0.8,
    "top_p": 0.95,
}
TOKENIZER_CONFIG = {
    "tokenizer_class": "GPT2Tokenizer",
    "model_max_length": CONTEXT,
    "add_prefix_space": False,
    "bos_token": "<|endoftext|>",
    "eos_token": "<|endoftext|>",
    "unk_token": "<|endoftext|>",
}
RENAMED = {
    "c_attn": "attn.c_attn",
    "attn_proj": "attn.c_proj",
    "c_fc": "mlp.c_fc",
    "mlp_proj": "mlp.c_proj",
}
SAMPLE_PROMPTS = ("Once upon a time", "The old sailor looked at the sea and", '"My dear," said')


def export_weights(state: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """GPT-2's names and orientation ([in, out]), fp16."""
    tensors = {}
    for name, tensor in state.items():
        values = tensor.numpy().astype(np.float16)
        block, _, rest = name.partition(".")
        layer, _, inner = rest.partition(".")
        module, _, kind = inner.rpartition(".")
        if block == "h" and module in RENAMED:
            oriented = values.T if kind == "weight" else values
            tensors[f"h.{layer}.{RENAMED[module]}.{kind}"] = np.ascontiguousarray(oriented)
        else:
            tensors[name] = values
    return tensors


def write_folder(work: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    state = torch.load(work / "checkpoint.pt", weights_only=True)
    weights = folder / "model.safetensors"
    save_file(export_weights(state["model"]), weights, {"format": "pt"})
    weights.chmod(0o644)  # it is made private, and a wheel keeps modes
    tokenizer = json.loads((work / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"] | {"<|endoftext|>": EOT}
    merges = [
        pair if isinstance(pair, str) else " ".join(pair) for pair in tokenizer["model"]["merges"]
    ]
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]))
    for name, value in {
        "vocab.json": vocab,
        "config.json": CONFIG,
        "generation_config.json": GENERATION_CONFIG,
        "tokenizer_config.json": TOKENIZER_CONFIG,
    }.items():
        (folder / name).write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n")


def held_out_losses(llm: LLM, text: str) -> np.ndarray:
    """[windows, CONTEXT - 1] nats a token, windows of CONTEXT tokens that do not overlap."""
    stream = llm.tokenizer.encode(text)
    num_windows = len(stream) // (CONTEXT - 1)
    rows = []
    for i in range(num_windows):
        window = stream[i * (CONTEXT - 1) : (i + 1) * (CONTEXT - 1)]
        scored = llm.score([EOT, *window][: CONTEXT - 1])
        rows.append([-token.logprob for token in scored if token is not None])
    return np.array(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--work", type=Path, required=True, help="where train_mini.py worked")
    parser.add_argument("--corpus", type=Path, help="folder of the archives (default: WORK/corpus)")
    parser.add_argument("--folder", type=Path, default=PACKAGE / "models" / "mini")
    options = parser.parse_args()
    train, held_out = load_documents(options.corpus or options.work / "corpus")
    text = "".join(document.text + "<|endoftext|>" for document in held_out)
    data = PACKAGE / "bench" / "data"
    data.mkdir(exist_ok=True)
    (data / "heldout.txt").write_text(text)
    write_folder(options.work, options.folder)
    llm = LLM(str(options.folder), kv_layout="contiguous", max_num_batched_tokens=CONTEXT)
    card = model_card(llm, options.work, text, sum(len(d.text) for d in train))
    (options.folder / "README.md").write_text(card)
    print(card)


def model_card(llm: LLM, work: Path, text: str, num_train_chars: int) -> str:
    losses = held_out_losses(llm, text)
    log = [json.loads(line) for line in (work / "log.jsonl").read_text().splitlines()]
    curve = {e["step"]: e for e in log if "held_out_loss" in e}
    bytes_per_token = len(text.encode()) / len(llm.tokenizer.encode(text))
    nats = float(losses.mean())
    rows = "\n".join(
        f"| {step} | {entry['train_loss']:.3f} | {entry['held_out_loss']:.3f} |"
        for step, entry in sorted(curve.items())
        if step % 400 == 0 or step == max(curve)
    )
    params = SamplingParams(max_tokens=120, temperature=0.8, top_p=0.95, seed=7)
    samples = "\n\n".join(
        f"> **{prompt}**{output.outputs[0].text}".replace("\n", "\n> ")
        for prompt, output in zip(
            SAMPLE_PROMPTS, llm.generate(list(SAMPLE_PROMPTS), params), strict=True
        )
    )
    archives = "\n".join(f"- `{a.pattern}`, sha256 `{a.sha256}`" for a in ARCHIVES.values())
    positions = {
        f"{low}-{high}": losses[:, low - 1 : high].mean() for low, high in ((64, 127), (768, 1022))
    }
    return (
        (Path(__file__).parent / "mini_card.md")
        .read_text()
        .format(
            parameters="4,469,760",
            steps=max(curve),
            tokens=max(curve) * SEQUENCES_PER_STEP * CONTEXT,
            nats=nats,
            bits=nats / np.log(2) / bytes_per_token,
            perplexity=np.exp(nats),
            early=positions["64-127"],
            late=positions["768-1022"],
            num_held_out=losses.size,
            num_train_chars=num_train_chars,
            num_held_out_chars=len(text),
            rows=rows,
            samples=samples,
            archives=archives,
            seed=SEED,
            width=WIDTH,
            layers=LAYERS,
            heads=HEADS,
            vocab=VOCAB_SIZE,
            context=CONTEXT,
            sequences=SEQUENCES_PER_STEP,
            muon=MUON_LR,
            adam=ADAM_LR,
            decay=WEIGHT_DECAY,
            dropout=DROPOUT,
        )
    )


if __name__ == "__main__":
    main()
