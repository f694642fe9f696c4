"""Bergson's plain gradient scores beside ours: the same run, window, documents, subsets and retrained windows.

    python trainer/benches/lds_bergson.py ZTRAIN ZDATA RUN A..B [DOCUMENTS [SUBSETS]]     needs bergson (tested: 2.5.1) and what it brings

`ztrain replay --attribute` retrains the window without each subset and says how the target's loss changes. Bergson gives to each
document of step A the product of its gradient (summed loss, every linear module and expert, no projection, no
preconditioner) with the target's, both at the state before A, which `ztrain export` hands to transformers. A subset's score is
the sum of its documents'. What is printed are rank correlations of scores and changes.
"""

import json
import pathlib
import subprocess
import sys
import tempfile

import torch
from bergson import GradientProcessor, InMemoryCollector, IndexConfig, CollectorComputer, expand_moe
from bergson.moe import ExpertLinear
from datasets import Dataset
from scipy.stats import pearsonr, spearmanr
from transformers import AutoModelForCausalLM

ztrain, zdata, run, window = sys.argv[1:5]
documents, subsets = sys.argv[5:6] or ["8"], sys.argv[6:7] or ["24"]
first, target = map(int, window.split(".."))


def told(*command):
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


def pieces(step):
    """Documents of a step: ids of their tokens, the label behind the last one included, by id and by part."""
    for row in told(zdata, "batch", f"{run}/run.toml", "--step", str(step), "--json")["sequences"]:
        for document in row["documents"]:
            begin, end = document["tokens"]
            ids = row["token_ids"][begin:end]
            if row["loss_mask"][end - 1]:
                ids.append(row["labels"][end - 1])
            if len(ids) > 1:
                yield document["id"], ids


class Collector(InMemoryCollector):
    """A module that a text does not reach (all its tokens take other experts) has a gradient of zero, where bergson has none."""

    def process_batch(self, indices, **more):
        sizes = {name: torch.Size(shape).numel() for name, shape in self.shapes().items()}
        none = {name: torch.zeros(len(indices), size, dtype=self.save_dtype) for name, size in sizes.items()}
        self.missed = getattr(self, "missed", 0) + len(none.keys() - self.mod_grads.keys())
        self.mod_grads = {name: self.mod_grads.get(name, zero) for name, zero in none.items()}
        super().process_batch(indices, **more)


def gradients(model, texts):
    """By text its gradient, all modules behind each other."""
    data = Dataset.from_dict({"input_ids": texts})
    with tempfile.TemporaryDirectory() as place:
        # Its hooks hold one input of a module, and v_proj_delayed is called twice in a pass; it knows no grouped convolutions.
        named = model.base_model.named_modules()
        fit = {name for name, module in named if isinstance(module, (torch.nn.Linear, ExpertLinear)) and not name.endswith("v_proj_delayed")}
        pathlib.Path(f"{place}/index.part").mkdir()
        config = IndexConfig(run_path=f"{place}/index", loss_reduction="sum")
        collector = Collector(model=model.base_model, target_modules=fit, data=data, cfg=config, processor=GradientProcessor())
        CollectorComputer(model, data, collector=collector, cfg=config).run_with_collector_hooks(desc="gradients")
        modules = sorted(collector.gradients)
        return torch.cat([collector.gradients[name].double() for name in modules], 1), modules


found = told(ztrain, "replay", "--run", run, "--steps", window, "--attribute", *documents, "--subsets", *subsets, "--json")
with tempfile.TemporaryDirectory() as place:
    subprocess.run([ztrain, "export", "--run", run, "--step", str(first - 1), "--out", f"{place}/hf"], check=True, stdout=subprocess.DEVNULL)
    model = AutoModelForCausalLM.from_pretrained(f"{place}/hf", dtype=torch.float32, attn_implementation="eager").eval()
experts = expand_moe(model.base_model, "*.experts")
read, wanted = list(pieces(first)), list(pieces(target))
own, modules = gradients(model, [ids for _, ids in read])
aim, _ = gradients(model, [ids for _, ids in wanted])
with torch.no_grad():
    losses = [model(torch.tensor([ids]), labels=torch.tensor([ids])).loss.item() * (len(ids) - 1) for _, ids in read]
labels = sum(len(ids) - 1 for _, ids in read)
products = (own @ aim.sum(0)).tolist()
score = {}
for (name, _), product in zip(read, products):
    score[name] = score.get(name, 0.0) + product
changes = [one["actual"] for one in found["subsets"]]
sums = [sum(score[name] for name in one["dropped"]) for one in found["subsets"]]
print(f"step {first}: {len(read)} parts of documents, {labels} labels, mean loss {sum(losses) / labels:.6f} in transformers")
print(f"{len(modules)} modules ({len(experts)} of experts), {own.shape[1]:,} of {model.num_parameters():,} weights")
for words, scores in [("bergson, one checkpoint", sums), ("ours, products at that checkpoint", [one.get("dot") for one in found["subsets"]]), ("ours, predicted", [one["predicted"] for one in found["subsets"]])]:
    if None not in scores:
        print(f"{words}: Spearman {spearmanr(changes, scores).statistic:.3f}, Pearson {pearsonr(changes, scores).statistic:.3f} over {len(changes)} subsets")
