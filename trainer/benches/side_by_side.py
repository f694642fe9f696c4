"""Tokens per second of `ztrain` and of transformers' zaya with torch's fused AdamW: same cores, shapes, masking, dtype.

    python trainer/benches/side_by_side.py target/release [--model zaya1-nano|zaya1-20m|zaya1-1b] [--dtype f32|bf16]
                                                          [--rows N] [--seq-len N] [--micro-batch N]
                                                          [--steps N] [--rounds N] [--device cpu|cuda]

Needs torch and transformers (nothing else here does). Both sides run in one go, in turns, so that a neighbour's load
meets both. The reference sees no document boundaries, so the fair row is the one with `document_mask = false`. In bf16
the fair reference is autocast, which has f32 master weights as ours does; `all in bf16` has none. With `--device cuda` both
compute on the GPU, ours with one worker.
"""

import argparse
import contextlib
import json
import os
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile
import time

VOCAB = 8192
SMALL = dict(hidden_size=256, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
             moe_intermediate_size=256, num_experts=8, router_hidden_size=64)
SHAPES = {"zaya1-nano": SMALL,
          "zaya1-20m": SMALL | dict(hidden_size=512, num_hidden_layers=16, moe_intermediate_size=512),
          "zaya1-1b": dict(hidden_size=1024, num_hidden_layers=26, num_attention_heads=8, num_key_value_heads=2, head_dim=64,
                           moe_intermediate_size=768, num_experts=16, router_hidden_size=128)}
CORES = len(os.sched_getaffinity(0))


def corpus(folder: pathlib.Path, tokens: int) -> None:
    """Random words of a fixed vocabulary, a store of them, and nothing that either side could learn faster."""
    random.seed(0)
    words = [f"w{index}" for index in range(VOCAB - 1)]
    vocab = {"<|end|>": 0} | {word: index + 1 for index, word in enumerate(words)}
    tokenizer = {"version": "1.0", "truncation": None, "padding": None, "normalizer": None,
                 "added_tokens": [{"id": 0, "content": "<|end|>", "single_word": False, "lstrip": False,
                                   "rstrip": False, "normalized": False, "special": True}],
                 "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": None, "decoder": None,
                 "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "<|end|>"}}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with open(folder / "text.jsonl", "w", encoding="utf-8") as out:
        for _ in range(tokens // 128 + 1):
            out.write(json.dumps({"text": " ".join(random.choices(words, k=127))}) + "\n")
    (folder / "corpus.toml").write_text(
        'tokenizer = "tokenizer.json"\nend = "<|end|>"\nunit = 4096\nvalidation = "0"\n'
        '[[source]]\nname = "words"\nfiles = ["text.jsonl"]\ntext = "text"\n')


def tokens_of_a_step(asked: argparse.Namespace) -> int:
    return asked.rows * asked.seq_len


def ours(programs: pathlib.Path, folder: pathlib.Path, asked: argparse.Namespace, kind: str, boundaries: bool) -> float:
    name = f"{kind}-{'documents' if boundaries else 'rows'}-{time.monotonic_ns()}"
    fields = "\n".join(f"{key} = {value}" for key, value in SHAPES[asked.model].items())
    (folder / f"{name}.toml").write_text(
        f'store = "store"\nseed = 1\ndtype = "{asked.dtype}"\n[model]\npreset = "{asked.model}"\nvocab_size = {VOCAB}\n{fields}\n'
        f"document_mask = {str(boundaries).lower()}\n"
        f'[optimizer]\nkind = "{kind}"\nlr = 1e-3\nclip = 1.0\n[schedule]\nwarmup_steps = 0\n'
        f'[[phase]]\nname = "all"\nsteps = {asked.steps}\nseq_len = {asked.seq_len}\nbatch = {asked.rows}\nmicro_batch = {asked.micro_batch}\n'
        'mix = { words = 1 }\n[source.words]\nmax_epochs = 100\n')
    if asked.device != "cpu":
        # A run ends with a checkpoint, which for a model that is worth a GPU takes longer than all of its steps.
        words = ["bench", "step", "--curriculum", folder / f"{name}.toml", "--device", asked.device, "--workers", "1", "--json",
                 "--steps", str(asked.steps - 1)]
        done = subprocess.run([programs / "ztrain", *words], check=True, capture_output=True, text=True)
        return json.loads(done.stdout)["tokens_per_second"]
    run = folder / name
    subprocess.run([programs / "ztrain", "--curriculum", folder / f"{name}.toml", "--out", run, "--quiet",
                    "--device", asked.device, "--workers", str(CORES if asked.device == "cpu" else 1), "--validate-every", "0"],
                   check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    seconds = [event["seconds"] for event in events if event["event"] == "step"][2:]
    return tokens_of_a_step(asked) / statistics.median(seconds)


def reference(asked: argparse.Namespace, narrow: bool) -> float:
    """`narrow`: weights and optimizer in bf16 too, instead of autocast over f32 weights."""
    import torch
    from transformers import ZayaConfig, ZayaForCausalLM
    torch.set_num_threads(CORES)
    torch.manual_seed(0)
    config = ZayaConfig(vocab_size=VOCAB, max_position_embeddings=4096, use_cache=False, **SHAPES[asked.model])
    model = ZayaForCausalLM(config).train()
    for name, parameter in model.named_parameters():
        if name.endswith("temp"):
            parameter.data.fill_(1.0)
    if narrow:
        model.to(torch.bfloat16)
    model.to(asked.device)
    kind = asked.device.split(":")[0]
    cast = asked.dtype == "bf16" and not narrow
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    tokens, seconds = torch.randint(0, VOCAB, (asked.rows, asked.seq_len)).to(asked.device), []
    for _ in range(asked.steps):
        start = time.perf_counter()
        with torch.autocast(kind, torch.bfloat16) if cast else contextlib.nullcontext():
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if kind != "cpu":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return tokens_of_a_step(asked) / statistics.median(seconds[2:])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("programs", type=pathlib.Path)
    parser.add_argument("--model", choices=SHAPES, default="zaya1-nano")
    parser.add_argument("--dtype", choices=["f32", "bf16"], default="f32")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    asked = parser.parse_args()
    programs = asked.programs.resolve()
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch)
        corpus(folder, asked.steps * tokens_of_a_step(asked))
        subprocess.run([programs / "zdata", "build", folder / "corpus.toml", "--out", folder / "store"],
                       check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        base = "transformers, fused AdamW"
        makers = {base: lambda: reference(asked, False)}
        if asked.dtype == "bf16":
            makers["transformers, all in bf16"] = lambda: reference(asked, True)
        makers |= {"ours, AdamW, rows only": lambda: ours(programs, folder, asked, "adamw", False),
                   "ours, AdamW, documents": lambda: ours(programs, folder, asked, "adamw", True),
                   "ours, Muon, documents": lambda: ours(programs, folder, asked, "muon", True)}
        rows = {name: [] for name in makers}
        for _ in range(asked.rounds):
            for name, make in makers.items():
                rows[name].append(make())
    print(f"{asked.model}, {asked.dtype}, {asked.rows} x {asked.seq_len} tokens, {CORES} cores, {asked.device}, medians of {asked.rounds} rounds of "
          f"{asked.steps} steps, load {os.getloadavg()[0]:.1f} at the end")
    for name, rates in rows.items():
        rate = statistics.median(rates)
        ratio = rate / statistics.median(rows[base])
        print(f"{name:28} {rate:8.0f} tok/s  x {ratio:.2f}  (from {min(rates):.0f} to {max(rates):.0f})")


if __name__ == "__main__":
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    main()
