"""Trains a small model from a curriculum with PyTorch alone; killed and started again, it goes on with the same bits.

    python train.py run.toml --out out
    torchrun --nproc-per-node 2 train.py run.toml --out out
"""

import argparse
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

import zdata
import zdata.torch


class Model(nn.Module):
    def __init__(self, vocab, width=32):
        super().__init__()
        self.embed, self.head = nn.Embedding(vocab, width), nn.Linear(width, vocab)
        self.attend, self.norm = nn.MultiheadAttention(width, 4, batch_first=True), nn.LayerNorm(width)

    def forward(self, tokens, positions):
        length = torch.arange(tokens.shape[1])
        begin = length - positions  # Where each token's document begins: nothing attends to what is before it.
        hidden = (length[None, :] > length[:, None]) | (length[None, None, :] < begin[:, :, None])
        x = self.embed(tokens)
        x = x + self.attend(x, x, x, attn_mask=hidden.repeat_interleave(4, 0), need_weights=False)[0]
        return self.head(self.norm(x))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("curriculum")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo", os.environ.get("ZDATA_MEETING"), rank=rank, world_size=world)
    torch.manual_seed(1)
    loader = zdata.Loader(args.curriculum, rank, world)
    model = Model(loader.plan.vocab)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    dataset = zdata.torch.IterableDataset(loader, transform=lambda batch: batch)
    args.out.mkdir(parents=True, exist_ok=True)
    checkpoint, log = args.out / "checkpoint.pt", args.out / "log.jsonl"
    lines = []
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        dataset.load_state_dict(saved["data"])
        lines = saved["log"]
    for batch in DataLoader(dataset, batch_size=None):
        sums = torch.zeros(2)  # The loss and the labels of all ranks.
        for micro in batch.micro_batches():
            logits = model(torch.from_numpy(micro.tokens), torch.from_numpy(micro.position_ids))
            labels = zdata.torch.shifted_labels(micro)
            losses = nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none").sum(1)
            (losses * torch.from_numpy(micro.loss_weights)).sum().backward()
            sums += torch.tensor([losses.sum().item(), micro.label_count])
        digests = [batch.sequence_digests]
        if world > 1:
            dist.all_reduce(sums)
            digests = [None] * world
            dist.all_gather_object(digests, batch.sequence_digests)
        for weight in model.parameters():
            weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
            if world > 1:
                dist.all_reduce(weight.grad)
            weight.grad /= sums[1]
        optimizer.step()
        optimizer.zero_grad()
        line = {"step": batch.step, "loss": (sums[0] / sums[1]).item(), "digest": zdata.step_digest(sum(digests, []))}
        lines.append(line)
        if rank == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state | {"data": dataset.state_dict(), "log": lines}, args.out / "new.pt")
            (args.out / "new.pt").replace(checkpoint)
            log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
