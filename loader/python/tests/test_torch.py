"""The package with PyTorch: order, workers, resume, ranks, and the shapes that its libraries take."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import unittest
import warnings
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader

import zdata
import zdata.torch
from data import curriculum, digests, examples, folder

try:
    from torchdata.stateful_dataloader import StatefulDataLoader
except ImportError:
    StatefulDataLoader = None
try:
    import transformers
except ImportError:
    transformers = None

# Runs a program that is killed in place of its COUNT-th checkpoint.
KILLED = """
import os, pathlib, runpy, signal, sys
left, replace = int(sys.argv[1]), pathlib.Path.replace
def dying(path, target):
    global left
    left -= 1
    return replace(path, target) if left else os.kill(os.getpid(), signal.SIGKILL)
pathlib.Path.replace = dying
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""

EXAMPLE = Path(os.environ.get("ZDATA_EXAMPLE", Path(__file__).parent.parent / "examples/train.py"))


def name(batch):
    """What an item of a dataset is: a transform that every worker can send."""
    return batch.step, batch.rows, batch.digest


def same(value):
    return value


def loaded(dataset, workers, method="fork", **more):
    """All items of a dataset by a DataLoader."""
    if workers:
        more |= {"num_workers": workers, "multiprocessing_context": method}
    return list(DataLoader(dataset, batch_size=None, collate_fn=same, **more))


class Workers(unittest.TestCase):
    def test_steps_come_in_order_and_once_whatever_the_workers(self):
        wanted = digests(curriculum())
        for workers, method in [(0, None), (1, "fork"), (4, "fork"), (2, "spawn")]:
            dataset = zdata.torch.IterableDataset(curriculum(), transform=name)
            items = loaded(dataset, workers, method)
            self.assertEqual([step for step, _, _ in items], list(range(1, 13)), (workers, method))
            self.assertEqual([digest for _, _, digest in items], wanted)

    def test_micro_batches_come_in_order_and_once(self):
        batches = [zdata.Loader(curriculum()).batch(step) for step in range(1, 13)]
        wanted = [name(part) for batch in batches for part in batch.micro_batches()]
        for workers in (0, 1, 3, 4):
            dataset = zdata.torch.IterableDataset(curriculum(), unit="micro_batch", transform=name)
            self.assertEqual(loaded(dataset, workers), wanted, workers)

    def test_a_map_style_dataset_has_every_step_and_every_sample(self):
        steps = zdata.torch.Dataset(curriculum(), transform=name)
        wanted = digests(curriculum())
        for workers in (0, 4):
            self.assertEqual([digest for _, _, digest in loaded(steps, workers)], wanted)
        samples = zdata.torch.Dataset(curriculum(), unit="sample", transform=name)
        self.assertEqual(len(samples), 86)
        rows = [digest for step in range(1, 13) for digest in zdata.Loader(curriculum()).batch(step).sequence_digests]
        self.assertEqual([zdata.step_digest([row]) for row in rows], [item[2] for item in loaded(samples, 2)])
        self.assertEqual(samples[-1], samples[85])
        self.assertRaises(IndexError, lambda: samples[86])

    def test_ranks_share_a_step(self):
        whole = zdata.Loader(curriculum())
        for world in (1, 2, 5):
            parts = [loaded(zdata.torch.IterableDataset(curriculum(), transform=name, rank=r, world=world), r % 3)
                     for r in range(world)]
            for step in range(1, 13):
                rows = sum((part[step - 1][1] for part in parts), [])
                self.assertEqual(rows, whole.batch(step).rows)


class Resume(unittest.TestCase):
    def test_a_state_is_a_step_and_fits_other_workers(self):
        wanted = loaded(zdata.torch.IterableDataset(curriculum(), transform=name), 0)
        for taken in (0, 6, 11):
            first = zdata.torch.IterableDataset(curriculum(), transform=name)
            items = [item for _, item in zip(range(taken), first)]
            state = json.loads(json.dumps(first.state_dict()))
            self.assertEqual(state, {"step": taken + 1})
            for workers in (0, 1, 4):
                second = zdata.torch.IterableDataset(curriculum(), transform=name)
                second.load_state_dict(state)
                self.assertEqual(items + loaded(second, workers), wanted)

    def test_micro_batches_go_on_within_a_step(self):
        wanted = loaded(zdata.torch.IterableDataset(curriculum(), unit="micro_batch", transform=name), 0)
        for taken in (0, 1, 5, 28, 29, 30, 42):
            first = zdata.torch.IterableDataset(curriculum(), unit="micro_batch", transform=name)
            items = [item for _, item in zip(range(taken), first)]
            second = zdata.torch.IterableDataset(curriculum(), unit="micro_batch", transform=name)
            second.load_state_dict(first.state_dict())
            self.assertEqual(items + loaded(second, taken % 4), wanted, taken)

    def test_threads_read_ahead_what_one_process_reads(self):
        for unit in zdata.torch.UNITS:
            wanted = loaded(zdata.torch.IterableDataset(curriculum(), unit=unit, transform=name), 0)
            for taken in (0, 1, 5, 29, len(wanted)):
                first = zdata.torch.IterableDataset(curriculum(), unit=unit, transform=name, threads=2)
                items = [item for _, item in zip(range(taken), first)]
                second = zdata.torch.IterableDataset(curriculum(), unit=unit, transform=name, threads=1)
                second.load_state_dict(first.state_dict())
                self.assertEqual(items + loaded(second, 0), wanted, (unit, taken))
            self.assertEqual(loaded(second, 2), loaded(second, 0), "workers have no threads")

    def test_a_state_within_a_step_needs_the_same_ranks(self):
        first = zdata.torch.IterableDataset(curriculum(), unit="micro_batch", transform=name)
        self.assertIsNotNone(next(iter(first)))
        state = first.state_dict()
        self.assertEqual(state, {"step": 1, "micro_batch": 1, "world": 1})
        other = zdata.torch.IterableDataset(curriculum(), unit="micro_batch", rank=0, world=2)
        with self.assertRaisesRegex(ValueError, "within step 1 of 1 ranks"):
            other.load_state_dict(state)
        with self.assertRaises(ValueError):
            zdata.torch.IterableDataset(curriculum()).load_state_dict(state)
        other.load_state_dict({"step": 2})

    def test_a_loader_has_its_rank_already(self):
        loader = zdata.Loader(curriculum())
        for wrong in ({"rank": 1}, {"world": 2}, {"overrides": {"seed": 9}}):
            with self.assertRaises(TypeError):
                zdata.torch.IterableDataset(loader, **wrong)
        with self.assertRaises(ValueError):
            zdata.torch.IterableDataset(loader, start=50)

    @unittest.skipIf(StatefulDataLoader is None, "torchdata is not installed")
    def test_a_stateful_data_loader_keeps_the_place(self):
        for unit in zdata.torch.UNITS:
            wanted = loaded(zdata.torch.IterableDataset(curriculum(), unit=unit, transform=name), 0)
            for workers in (0, 1, 3):
                for taken in (1, 7):
                    def begin():
                        dataset = zdata.torch.IterableDataset(curriculum(), unit=unit, transform=name)
                        return StatefulDataLoader(dataset, batch_size=None, num_workers=workers, collate_fn=same)

                    first = begin()
                    items = [item for _, item in zip(range(taken), first)]
                    second = begin()
                    second.load_state_dict(first.state_dict())
                    self.assertEqual(items + list(second), wanted, (unit, workers, taken))


class Shapes(unittest.TestCase):
    def setUp(self):
        self.batch = zdata.Loader(curriculum()).batch(9)

    def test_tensors_share_the_batchs_memory(self):
        tensors = self.batch.torch()
        for key in ("tokens", "labels", "loss_mask", "position_ids"):
            array = getattr(self.batch, key)
            self.assertEqual(tensors[key].data_ptr(), array.ctypes.data)
            np.testing.assert_array_equal(tensors[key].numpy(), array)
        self.assertEqual((tensors["digest"], tensors["step"]), (self.batch.digest, 9))
        tokens = tensors["tokens"].clone()
        address = tensors["tokens"]
        del tensors, self.batch
        torch.testing.assert_close(address, tokens)

    def test_weights_of_losses_arrive_or_are_refused(self):
        batch = zdata.Loader(curriculum(), overrides={"source.web": {"loss_weight": 1.5}}).batch(9)
        wanted = [1.5 if batch.source(row) == "web" else 1 for row in range(len(batch))]
        self.assertIn(1.5, wanted)
        self.assertEqual(batch.torch()["loss_weights"].tolist(), wanted)
        self.assertEqual(self.batch.torch()["loss_weights"].tolist(), [1] * len(self.batch))
        with self.assertRaisesRegex(ValueError, "loss_weight"):
            batch.for_transformers()

    def test_documents_do_not_attend_to_each_other(self):
        """Attention by `cu_seqlens` is attention by the mask that positions give."""
        starts = self.batch.cu_seqlens
        document = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
        counted = np.concatenate([np.arange(length) for length in np.diff(starts)])
        np.testing.assert_array_equal(counted, self.batch.position_ids.reshape(-1))
        self.assertEqual(len(document), self.batch.tokens.size)

    def test_what_transformers_shifts_are_the_labels(self):
        """The loss of transformers, which shifts labels, is ours without the last token of each row."""
        torch.manual_seed(1)
        logits = torch.randn(*self.batch.tokens.shape, 300)
        item = self.batch.for_transformers()
        flat = lambda values: values.reshape(-1, *values.shape[2:])
        theirs = torch.nn.functional.cross_entropy(flat(logits[:, :-1]), flat(item["labels"][:, 1:]), reduction="sum")
        each = torch.nn.functional.cross_entropy(flat(logits), flat(torch.from_numpy(self.batch.labels).long()), reduction="none")
        counts = torch.from_numpy(self.batch.loss_mask).float()
        counts[:, -1] = 0
        torch.testing.assert_close(theirs, (each * flat(counts)).sum())
        mask = torch.from_numpy(self.batch.loss_mask)[:, :-1]
        self.assertEqual(int((item["labels"] != -100).sum()), int(mask.sum()))
        self.assertTrue(bool((item["labels"][:, 0] == -100).all()))
        self.assertEqual({tensor.dtype for tensor in item.values()}, {torch.int64})
        joined = zdata.torch.collate([item, item])
        self.assertEqual(joined["input_ids"].shape[0], 2 * len(self.batch))


@unittest.skipIf(transformers is None, "transformers is not installed")
class OfTransformers(unittest.TestCase):
    def test_a_trainer_sees_every_micro_batch_in_order_and_takes_our_labels(self):
        seen = []
        sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        sizes["vocab_size"] = zdata.Plan(curriculum()).vocab
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
        model.register_forward_pre_hook(lambda _, args, named: seen.append(named), with_kwargs=True)
        make = lambda **more: zdata.torch.IterableDataset(curriculum(), unit="micro_batch", **more)
        parts = [part for batch in zdata.Loader(curriculum()).batches() for part in batch.micro_batches()]
        with tempfile.TemporaryDirectory() as out:
            settings = transformers.TrainingArguments(
                out, max_steps=len(parts), per_device_train_batch_size=1, report_to=[], use_cpu=True, logging_steps=1,
                save_strategy="no", disable_tqdm=True, accelerator_config={"dispatch_batches": False},
            )
            trainer = transformers.Trainer(
                model, settings, train_dataset=make(transform=zdata.torch.for_transformers),
                data_collator=zdata.torch.collate,
            )
            trainer.train()
        self.assertEqual(len(seen), len(parts))
        for given, part in zip(seen, parts):
            np.testing.assert_array_equal(given["input_ids"].numpy(), part.tokens)
            np.testing.assert_array_equal(given["position_ids"].numpy(), part.position_ids)
            self.assertEqual(int((given["labels"] != -100).sum()), int(part.loss_mask[:, :-1].sum()))


class OfReadme(unittest.TestCase):
    def test_its_examples_run(self):
        blocks = examples(with_torch=True)
        self.assertGreater(len(blocks), 1)
        for block in blocks:
            subprocess.run([sys.executable, "-c", block], cwd=folder(), check=True, stdout=subprocess.DEVNULL)


class Example(unittest.TestCase):
    def train(self, folder, ranks, killed_at=None):
        """Runs the example on so many ranks; returns the lines of its log."""
        program = [] if killed_at is None else ["-c", KILLED, str(killed_at)]
        with tempfile.TemporaryDirectory() as meeting:
            started = []
            for rank in range(ranks):
                environment = os.environ | {"RANK": str(rank), "WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
                environment |= {"ZDATA_MEETING": f"file://{meeting}/meeting"}
                command = [sys.executable, *program, EXAMPLE, curriculum(), "--out", folder]
                started.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
            for rank, process in enumerate(started):
                if killed_at is not None and rank > 0:
                    process.kill()  # Rank 0 is dead, and nothing tells the others.
                errors = process.communicate(timeout=300)[1]
                self.assertEqual(process.returncode, 0 if killed_at is None else -signal.SIGKILL, errors)
        return [json.loads(line) for line in (Path(folder) / "log.jsonl").read_text().splitlines()]

    def test_an_example_that_is_killed_goes_on_with_the_same_losses_and_data(self):
        wanted = digests(curriculum())
        runs = {}
        for ranks in (1, 2) if "FULL" in os.environ else (1,):
            with tempfile.TemporaryDirectory() as whole, tempfile.TemporaryDirectory() as killed:
                runs[ranks] = self.train(whole, ranks)
                self.assertEqual([line["step"] for line in runs[ranks]], list(range(1, 13)))
                self.assertEqual([line["digest"] for line in runs[ranks]], wanted)
                self.assertEqual(self.train(killed, ranks, killed_at=5), runs[ranks][:4])
                self.assertEqual(self.train(killed, ranks), runs[ranks])
        self.assertLess(runs[1][-1]["loss"], runs[1][0]["loss"])
        for one, two in zip(runs[1], runs.get(2, [])):
            self.assertAlmostEqual(one["loss"], two["loss"], places=3)


if __name__ == "__main__":
    warnings.filterwarnings("ignore", "This DataLoader will create")
    unittest.main(verbosity=2)
