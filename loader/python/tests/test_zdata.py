"""The package without PyTorch, against the command `zdata`, the corpus itself and NumPy."""

import gc
import json
import multiprocessing
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import unittest
from pathlib import Path

import numpy as np

import zdata
from data import curriculum, digests, examples, folder
from data import zdata as command


def batch_of(path, step, rank=0, world=1):
    """A batch as `zdata batch --json` prints it."""
    answer = command("batch", path, "--step", step, "--rank", rank, "--world", world, "--json")
    return json.loads(answer.stdout)


class Import(unittest.TestCase):
    def test_importing_starts_no_thread_and_no_numpy(self):
        program = (
            "import os, sys, zdata\n"
            "assert 'numpy' not in sys.modules and 'torch' not in sys.modules\n"
            "print(len(os.listdir('/proc/self/task')))"
        )
        ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        self.assertEqual(ran.stdout, "1\n")

    def test_what_is_exported_is_there(self):
        for name in zdata.__all__:
            self.assertTrue(hasattr(zdata, name), name)


class OfStore(unittest.TestCase):
    def setUp(self):
        self.store = zdata.Store(folder() / "store")

    def test_it_says_what_inspect_says(self):
        told = json.loads(command("inspect", folder() / "store", "--json").stdout)
        self.assertEqual(self.store.digest, told["digest"])
        self.assertEqual(self.store.sources, ("web", "math"))
        self.assertEqual(self.store.tokenizer(), (folder() / "tokenizer.json").read_bytes())

    def test_documents_are_those_of_the_corpus(self):
        ids = set()
        for source in self.store.sources:
            for split in ("train", "validation"):
                stream = self.store.stream(source, split)
                documents = self.store.documents(source, split=split)
                self.assertEqual(len(documents), stream.documents)
                starts = self.store.starts(source, split=split)
                self.assertEqual(starts.tolist(), [document.first_token for document in documents])
                for document in documents:
                    ids.add(document.id)
                    raw = (folder() / document.file).read_bytes()[slice(*document.bytes)]
                    self.assertEqual(json.loads(raw)["id"], document.id)
                    tokens = self.store.document_tokens(document, split)
                    self.assertEqual(tokens[-1], self.store.end)
                    self.assertEqual((tokens == self.store.end).sum(), 1)
                middle = documents[len(documents) // 2]
                self.assertEqual(self.store.document(source, middle.number, split), middle)
                self.assertEqual(self.store.find(source, middle.id, split), [middle.number])
        self.assertEqual(len(ids), 320)

    def test_tokens_are_those_of_the_arrow_files_and_of_every_cut(self):
        every = self.store.tokens("web")
        self.assertEqual((every.dtype, len(every)), (np.int32, self.store.stream("web").tokens))
        cuts = [0, 1, 777, 778, len(every)]
        parts = [self.store.tokens("web", a, b) for a, b in zip(cuts, cuts[1:])]
        np.testing.assert_array_equal(np.concatenate(parts), every)
        self.assertEqual(len(self.store.tokens("web", 5, 5)), 0)
        # The values of the record batches stand in the file as they are: every run of one block is found there.
        raw = b"".join(path.read_bytes() for path in sorted((folder() / "store/web").glob("*/tokens-train-*.arrow")))
        self.assertIn(every[:500].astype("<u2").tobytes(), raw)

    def test_an_array_outlives_its_store_and_is_no_copy(self):
        tokens = zdata.Store(folder() / "store").tokens("math", 0, 100)
        gc.collect()
        np.testing.assert_array_equal(tokens, self.store.tokens("math", 0, 100))
        self.assertFalse(tokens.flags.owndata)

    def test_wrong_use_is_said_with_its_parts(self):
        with self.assertRaises(zdata.UsageError) as caught:
            self.store.tokens("wbe")
        self.assertEqual((caught.exception.found, caught.exception.exit_code), ("wbe", 2))
        self.assertIn("web", caught.exception.hint)
        with self.assertRaises(zdata.UsageError) as caught:
            self.store.tokens("web", 10, 1 << 40)
        self.assertIn("tokens within 0..", caught.exception.wanted)
        with self.assertRaises(zdata.UsageError):
            self.store.documents("web", 3, 2)
        with self.assertRaises(zdata.UsageError) as caught:
            self.store.tokens("web", -5)
        self.assertEqual((caught.exception.place, caught.exception.found), ("start", "-5"))
        with self.assertRaises(zdata.UsageError):
            self.store.stream("web", "test")
        with self.assertRaises(zdata.DataError) as caught:
            zdata.Store("nowhere")
        self.assertIn("nowhere", caught.exception.place)
        self.assertIsInstance(caught.exception, zdata.Error)
        again = pickle.loads(pickle.dumps(caught.exception))
        self.assertEqual((str(again), again.place), (str(caught.exception), caught.exception.place))


class OfObjective(unittest.TestCase):
    FIM = {"rate": 0.8, "spm": 0.3, "prefix": 0, "middle": 1, "suffix": 2}

    def pairs(self, **keys):
        """Each row of `web` with its documents: as it is without `keys` of the source, and with them."""
        plain = zdata.Loader(curriculum())
        changed = zdata.Loader(curriculum(), overrides={"source.web": keys})
        for step in range(1, plain.plan.steps + 1):
            before, after = plain.batch(step), changed.batch(step)
            for row in range(len(before)):
                if before.source(row) == "web":
                    yield before, after, row, after.where(row)
                else:
                    self.assertEqual(before.sequence_digests[row], after.sequence_digests[row])

    def test_pieces_are_rearranged_as_they_say(self):
        seen = set()
        for before, after, row, parts in self.pairs(fim=self.FIM):
            for part in parts:
                first, last = part.tokens
                text, found = before.tokens[row][first:last].tolist(), after.tokens[row][first:last].tolist()
                seen.add(part.infill.mode if part.infill else None)
                if part.infill is None:
                    self.assertEqual(text, found)
                    continue
                at, sighting = part.of_document[0], (after.step, row, part)
                prefix, middle, suffix = (
                    text[a - at : b - at] for a, b in (part.infill.prefix, part.infill.middle, part.infill.suffix)
                )
                end = text[part.infill.left_out[1] - at :]
                self.assertEqual(end, text[-1:] if part.of_document[1] == part.document_tokens else [])
                self.assertEqual(part.infill.left_out[1] - part.infill.left_out[0], 3)
                order = [0, *prefix, 2, *suffix, 1, *middle]
                if part.infill.mode == "spm":
                    order = [0, 2, *suffix, 1, *prefix, *middle]
                self.assertEqual(order + end, found)
                self.assertEqual(after.labels[row][first:last].tolist(), [*found[1:], 0])
                self.assertEqual(after.loss_mask[row][first:last].tolist(), [1] * (len(found) - 1) + [0])
        self.assertEqual(seen, {None, "psm", "spm"})
        (found,) = zdata.Plan(curriculum(), {"source.web": {"fim": self.FIM}}).where(sighting[2].id)
        places = {(place.step, place.sequence): place.infill for place in found.seen}
        self.assertEqual(places[sighting[:2]], sighting[2].infill)

    def test_a_mask_follows_the_text_alone(self):
        kept = {}
        for before, after, row, parts in self.pairs(mask={"every": 4, "context": 2}, loss_weight=1.5):
            self.assertTrue((after.tokens[row] == before.tokens[row]).all())
            self.assertEqual(after.loss_weights[row], 1.5)
            for part in parts:
                for place in range(*part.tokens):
                    label = after.labels[row][place]
                    counts = after.loss_mask[row][place]
                    self.assertEqual(label, before.labels[row][place] if counts else 0)
                    if before.loss_mask[row][place]:
                        number = part.of_document[0] + place - part.tokens[0] + 1
                        # Of which two tokens come before it.
                        key = tuple(before.tokens[row][place - 1 : place + 1]) if number >= 2 else None
                        if place > part.tokens[0]:
                            self.assertEqual(kept.setdefault(key, counts), counts)
                        if number < 2:
                            self.assertEqual(counts, 1)
        left_out = sum(1 for counts in kept.values() if not counts) / len(kept)
        self.assertTrue(0.15 < left_out < 0.35, left_out)


class OfPlan(unittest.TestCase):
    def test_it_says_what_the_command_says(self):
        told = json.loads(command("plan", curriculum(), "--json").stdout)
        plan = zdata.Plan(curriculum())
        self.assertEqual((plan.steps, plan.samples, plan.tokens), (12, 7 * 8 + 5 * 6, told["tokens"]))
        self.assertEqual(plan.digest, told["digest"])
        self.assertEqual([phase.digest for phase in plan.phases], [phase["digest"] for phase in told["phases"]])
        self.assertEqual([source.taken for source in plan.sources], [source["taken"] for source in told["sources"]])
        shares = {use.name: use.share for use in plan.phases[0].sources}
        self.assertAlmostEqual(shares["web"], 0.7)
        self.assertAlmostEqual(shares["math"], 0.3)

    def test_overrides_are_the_file_that_says_the_same(self):
        text = curriculum().read_text().replace("seed = 11", "seed = 12").replace("steps = 7", "steps = 3")
        changed = folder() / "changed.toml"
        changed.write_text(text)
        plan = zdata.Plan(curriculum(), {"seed": 12, "phase.short.steps": 3})
        self.assertEqual(plan.digest, zdata.Plan(changed).digest)
        self.assertNotEqual(plan.digest, zdata.Plan(curriculum()).digest)
        by_number = zdata.Plan(curriculum(), {"seed": 12, "phase.0.steps": 3, "source.math": {"max_epochs": 9}})
        self.assertEqual(plan.digest, by_number.digest)
        self.assertEqual(zdata.Loader(plan).batch(2).digest, digests(changed)[1])

    def test_an_override_leaves_all_other_text_as_it_was_typed(self):
        text = curriculum().read_text()
        weight = re.search(r"mix = \{.*\}", text).group(0)
        fine = re.sub(r"= [0-9.]+", "= 0.123456789012345678", weight, count=1)
        self.assertNotEqual(fine, weight)
        typed = folder() / "fine.toml"
        typed.write_text(text.replace(weight, fine, 1))
        self.assertEqual(zdata.Plan(typed).digest, zdata.Plan(typed, {"seed": 11}).digest)

    def test_an_override_that_is_wrong_is_refused(self):
        for overrides, words in [
            ({"sede": 3}, ["sede", "seed"]),
            ({"phase.shrot.steps": 3}, ["phase.shrot.steps", "short, long"]),
            ({"seed.deep": 3}, ["seed.deep"]),
            ({"phase.short.steps": -1}, ["-1"]),
        ]:
            with self.assertRaises(zdata.UsageError) as caught:
                zdata.Plan(curriculum(), overrides)
            for word in words:
                self.assertIn(word, str(caught.exception))

    def test_where_is_the_inverse_of_batch(self):
        plan, loader = zdata.Plan(curriculum()), zdata.Loader(curriculum())
        part = loader.batch(3).where(1)[0]
        (found,) = plan.where(part.id)
        (place,) = [place for place in found.seen if (place.step, place.sequence) == (3, 1) and place.offset == part.tokens[0]]
        self.assertEqual(place.tokens, part.of_document)
        with self.assertRaises(zdata.UsageError):
            plan.where("no such document")

    def test_a_mix_that_reacts_is_known_as_far_as_it_is_fixed(self):
        mix = {"rule": "learnability", "start": {"web": 7, "math": 3}, "window": 2}
        loader = zdata.Loader(curriculum(), overrides={"phase.short.mix": mix})
        self.assertEqual((loader.plan.fixed_until, loader.steps), (4, 12))
        self.assertEqual(loader.batch(4).step, 4)
        for read in (lambda: loader.batch(5), lambda: list(loader.batches(4, 6)), lambda: loader.digests(4, 6)):
            with self.assertRaises(zdata.UsageError) as caught:
                read()
            for word in ("step 5 is not fixed", "run=RUN"):
                self.assertIn(word, str(caught.exception))
        with self.assertRaises(zdata.UsageError):
            zdata.Plan(curriculum(), run=folder() / "nowhere")

    def test_a_curriculum_that_is_wrong_names_its_line(self):
        wrong = folder() / "wrong.toml"
        wrong.write_text(curriculum().read_text().replace("seq_len = 64", "seq_len = 0"))
        with self.assertRaises(zdata.UsageError) as caught:
            zdata.Plan(wrong)
        ran = command("plan", wrong, check=False)
        self.assertEqual((ran.returncode, ran.stderr), (caught.exception.exit_code, f"error: {caught.exception}\n"))


class OfLoader(unittest.TestCase):
    def setUp(self):
        self.loader = zdata.Loader(curriculum())

    def test_batches_are_those_of_the_command(self):
        for step in (1, 7, 8, 12):
            for rank, world in [(0, 1), (0, 3), (2, 3), (6, 7)]:
                told = batch_of(curriculum(), step, rank, world)
                batch = zdata.Loader(curriculum(), rank, world).batch(step)
                self.assertEqual(batch.rows, [row["sequence"] for row in told["sequences"]])
                self.assertEqual(batch.samples, [row["sample"] for row in told["sequences"]])
                self.assertEqual(batch.sequence_digests, [row["digest"] for row in told["sequences"]])
                self.assertEqual(batch.tokens.shape, (len(batch), told["seq_len"]))
                for row, wanted in enumerate(told["sequences"]):
                    self.assertEqual(batch.tokens[row].tolist(), wanted["token_ids"])
                    self.assertEqual(batch.labels[row].tolist(), wanted["labels"])
                    self.assertEqual(batch.loss_mask[row].tolist(), wanted["loss_mask"])
                    self.assertEqual(batch.source(row), wanted["source"])
                    where = batch.where(row, text=True)
                    self.assertEqual([part.text for part in where], [part["text"] for part in wanted["documents"]])

    def test_digests_are_those_of_the_command(self):
        wanted = digests(curriculum())
        self.assertEqual([self.loader.batch(step).digest for step in range(1, 13)], wanted)
        self.assertEqual([batch.digest for batch in self.loader.batches()], wanted)
        self.assertEqual([batch.digest for batch in self.loader.batches(4, 9, threads=3, depth=1)], wanted[3:8])
        self.assertEqual(self.loader.digests(threads=2), wanted)
        for wrong in ({"threads": 0}, {"threads": 1 << 60}, {"depth": 1 << 60}, {"depth": -1}):
            with self.assertRaises(zdata.UsageError):
                next(self.loader.batches(**wrong))
        for world in (2, 3, 5):
            parts = [zdata.Loader(curriculum(), rank, world).batch(9).sequence_digests for rank in range(world)]
            self.assertEqual(zdata.step_digest(sum(parts, [])), wanted[8])

    def test_rows_are_what_their_documents_say(self):
        store = zdata.Store(folder() / "store")
        for step in (2, 11):
            batch = self.loader.batch(step)
            starts = [0]
            for row in range(len(batch)):
                parts, at = batch.where(row, text=True), 0
                for part in parts:
                    document = store.document(batch.source(row), part.document)
                    tokens = store.document_tokens(document)[slice(*part.of_document)]
                    place = slice(*part.tokens)
                    self.assertEqual(part.tokens[0], at)
                    np.testing.assert_array_equal(batch.tokens[row, place], tokens)
                    np.testing.assert_array_equal(batch.position_ids[row, place], np.arange(len(tokens)))
                    ends = part.of_document[1] == part.document_tokens
                    self.assertEqual(batch.loss_mask[row, place].sum(), len(tokens) - ends)
                    raw = json.loads((folder() / document.file).read_bytes()[slice(*document.bytes)])
                    self.assertIn(part.text.removesuffix("<|endoftext|>"), raw["text"])
                    at = part.tokens[1]
                    starts.append(row * batch.seq_len + at)
                if at < batch.seq_len:
                    self.assertEqual(batch.tokens[row, at:].any(), False)
                    starts.append((row + 1) * batch.seq_len)
            self.assertEqual((batch.cu_seqlens.dtype, batch.cu_seqlens.tolist()), (np.int32, starts))
            self.assertEqual(batch.max_seqlen, np.diff(batch.cu_seqlens).max())
            self.assertEqual(batch.label_count, int((batch.loss_mask == 1).sum()))

    def test_micro_batches_are_views_of_the_batch(self):
        batch = self.loader.batch(10)
        parts = list(batch.micro_batches())
        self.assertEqual([len(part) for part in parts], [2, 2, 2])
        np.testing.assert_array_equal(np.concatenate([part.tokens for part in parts]), batch.tokens)
        self.assertTrue(np.shares_memory(parts[1].tokens, batch.tokens))
        self.assertEqual(zdata.step_digest(sum([part.sequence_digests for part in parts], [])), batch.digest)
        shifted = parts[1].cu_seqlens + 2 * batch.seq_len
        self.assertTrue(set(shifted.tolist()) <= set(batch.cu_seqlens.tolist()))
        self.assertEqual(parts[2].rows, [4, 5])
        for rank, world in [(0, 1), (1, 2), (2, 3)]:
            loader = zdata.Loader(curriculum(), rank, world)
            views = list(loader.batch(10).micro_batches())
            read = [loader.micro_batch(10, index) for index in range(loader.micro_batch_count(10))]
            self.assertEqual([(part.rows, part.digest) for part in read], [(part.rows, part.digest) for part in views])
            self.assertRaises(zdata.UsageError, lambda: loader.micro_batch(10, len(views)))

    def test_memory_is_not_reused_while_it_is_referenced(self):
        wanted = self.loader.batch(1).tokens.copy()
        tokens = self.loader.batch(1).tokens
        for step in range(2, 13):
            self.loader.batch(step)
        gc.collect()
        np.testing.assert_array_equal(tokens, wanted)

    def test_samples_and_rows(self):
        batch = self.loader.batch(8)
        for row in (0, 5):
            one = self.loader.sample(7 * 8 + row)
            self.assertEqual((one.step, one.rows, one.sequence_digests), (8, [row], [batch.sequence_digests[row]]))
        for wrong in (lambda: self.loader.rows(8, [6]), lambda: self.loader.batch(0), lambda: self.loader.batch(13),
                      lambda: self.loader.sample(86), lambda: next(self.loader.batches(5, 14)),
                      lambda: zdata.Loader(curriculum(), 2, 2)):
            self.assertRaises(zdata.UsageError, wrong)

    def test_damage_is_found_when_it_is_read(self):
        copy = folder() / "damaged"
        shutil.copytree(folder() / "store", copy, dirs_exist_ok=True)
        (shard,) = (copy / "web").glob("*/tokens-train-00000.arrow")
        raw = bytearray(shard.read_bytes())
        raw[5000] ^= 1
        shard.write_bytes(raw)
        loader = zdata.Loader(curriculum(), overrides={"store": str(copy)})
        with self.assertRaises(zdata.DataError) as caught:
            for batch in loader.batches():
                pass
        self.assertIn("tokens-train-00000.arrow", caught.exception.place)

    def test_threads_may_share_a_loader(self):
        wanted, found = digests(curriculum()), {}
        read = lambda step: found.update({step: self.loader.batch(step).digest})
        threads = [threading.Thread(target=read, args=(step,)) for step in range(1, 13)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        self.assertEqual([found[step] for step in range(1, 13)], wanted)


def _read(loader, steps, answers):
    try:
        answers.put([loader.batch(step).digest for step in steps])
    except BaseException as error:
        answers.put(repr(error))


class OfProcesses(unittest.TestCase):
    def read_in_child(self, method, loader):
        context = multiprocessing.get_context(method)
        answers = context.Queue()
        child = context.Process(target=_read, args=(loader, [2, 9], answers))
        child.start()
        answer = answers.get(timeout=120)
        child.join()
        self.assertEqual((answer, child.exitcode), ([digests(curriculum())[1], digests(curriculum())[8]], 0))

    def test_a_spawned_child_reads_the_same(self):
        self.read_in_child("spawn", zdata.Loader(curriculum()))

    def test_a_forked_child_reads_the_same_while_threads_read_in_its_parent(self):
        loader = zdata.Loader(curriculum())
        ahead, end = loader.batches(threads=4, depth=2), threading.Event()
        held = next(ahead)

        def read():
            while not end.is_set():
                loader.batch(1)

        threads = [threading.Thread(target=read) for _ in range(3)]
        [thread.start() for thread in threads]
        try:
            for _ in range(5):
                self.read_in_child("fork", loader)
        finally:
            end.set()
            [thread.join() for thread in threads]
        self.assertEqual([held.digest, *[batch.digest for batch in ahead]], digests(curriculum()))

    def test_an_iterator_goes_on_in_a_forked_child_and_leaves_its_parents_batches_alone(self):
        ahead = zdata.Loader(curriculum()).batches()
        held = next(ahead)
        child = os.fork()
        if child == 0:
            try:
                found = [batch.digest for batch in ahead]
                refused = False
                try:
                    held.digest
                except zdata.UsageError:
                    refused = True
                del held
                os._exit(0 if refused and found == digests(curriculum())[1:] else 1)
            finally:
                os._exit(2)
        self.assertEqual(os.waitpid(child, 0)[1], 0)
        self.assertEqual([batch.digest for batch in ahead], digests(curriculum())[1:])


class OfCommand(unittest.TestCase):
    def test_the_package_runs_the_command(self):
        own = [sys.executable, "-m", "zdata"]
        ran = subprocess.run([*own, "digest", curriculum(), "--steps", "3..5"], capture_output=True, text=True)
        self.assertEqual((ran.returncode, ran.stderr), (0, ""))
        self.assertEqual([line.split()[1] for line in ran.stdout.splitlines()], digests(curriculum())[2:4])
        ran = subprocess.run([*own, "digest", curriculum(), "--steps", "3..50"], capture_output=True, text=True)
        self.assertEqual(ran.returncode, 2)
        self.assertIn("error:", ran.stderr)
        self.assertEqual(subprocess.run([*own, "--version"], capture_output=True, text=True).stdout,
                         f"zdata {zdata.__version__}\n")

    def test_ctrl_c_ends_a_build_and_the_next_one_goes_on(self):
        corpus, store = folder() / "long.toml", folder() / "long"
        corpus.write_text((folder() / "corpus.toml").read_text().replace("web-*.jsonl", "long-*.jsonl"))
        text = (folder() / "web-0.jsonl").read_text()
        # A program that starts these tests may block signals, which its children inherit.
        before = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        self.addCleanup(signal.pthread_sigmask, signal.SIG_SETMASK, before)
        build = [sys.executable, "-m", "zdata", "build", corpus, "--out", store, "--workers", "1", "--quiet"]
        for doubling in range(8):  # Until a build is not over before it can be stopped.
            (folder() / f"long-{doubling}.jsonl").write_text(text * (64 << doubling))
            shutil.rmtree(store, ignore_errors=True)
            child = subprocess.Popen(build, stdout=subprocess.DEVNULL)
            while child.poll() is None and not Path(f"{store}.work").exists():
                time.sleep(0.01)
            child.send_signal(signal.SIGINT)
            if child.wait(timeout=120) != 0:
                break
        self.assertEqual(child.returncode, -signal.SIGINT)
        self.assertFalse((store / "manifest.json").exists())
        subprocess.run(build, check=True, stdout=subprocess.DEVNULL)
        self.assertTrue((store / "manifest.json").exists())


class OfReadme(unittest.TestCase):
    def test_its_examples_run(self):
        blocks = examples(with_torch=False)
        self.assertGreater(len(blocks), 2)
        for block in blocks:
            subprocess.run([sys.executable, "-c", block], cwd=folder(), check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    unittest.main(verbosity=2)
