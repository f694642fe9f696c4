"""A small corpus with its store and curriculum, made by the command `zdata`, and what that command says."""

import atexit
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

WORDS = "the a river of tokens runs through every shard and no step is lost while ranks come go once each".split()

CORPUS = """tokenizer = "tokenizer.json"
end = "<|endoftext|>"
unit = 1024
validation = "1/50"

[[source]]
name = "web"
files = ["web-*.jsonl"]
text = "text"
id = "id"

[[source]]
name = "math"
files = ["math.jsonl"]
text = "text"
id = "id"
"""

CURRICULUM = """store = "store"
seed = 11
dtype = "f32"

[source.math]
max_epochs = 9

[[phase]]
name = "short"
steps = 7
seq_len = 64
batch = 8
micro_batch = 2
mix = { web = 0.7, math = "3/10" }

[[phase]]
name = "long"
steps = 5
seq_len = 128
batch = 6
micro_batch = 2
mix = { web = 1, math = 3 }
"""


def zdata(*args, check=True):
    """Runs the command: the Rust binary where ZDATA names it, the package's own otherwise."""
    command = [os.environ["ZDATA"]] if "ZDATA" in os.environ else [sys.executable, "-m", "zdata"]
    return subprocess.run([*command, *map(str, args)], capture_output=True, text=True, check=check)


def _make(folder):
    source = random.Random(7)
    for name, seed, documents in [("web-0", 1, 120), ("web-1", 2, 120), ("math", 3, 80)]:
        lines = []
        for number in range(documents):
            text = " ".join(source.choices(WORDS, k=source.randint(5, 160)))
            lines.append(json.dumps({"id": f"doc-{seed}-{number}", "text": text}) + "\n")
        (folder / f"{name}.jsonl").write_text("".join(lines))
    (folder / "corpus.toml").write_text(CORPUS)
    (folder / "run.toml").write_text(CURRICULUM)
    zdata("tokenizer", "train", folder / "corpus.toml", "--vocab", 300, "--out", folder / "tokenizer.json")
    zdata("build", folder / "corpus.toml", "--out", folder / "store", "--workers", 2)


def folder():
    """The folder of the corpus, made once for a process and its children."""
    made = os.environ.get("ZDATA_TEST_DATA")
    if made is None:
        made = tempfile.mkdtemp()
        process = os.getpid()
        atexit.register(lambda: os.getpid() == process and shutil.rmtree(made))
        _make(Path(made))
        os.environ["ZDATA_TEST_DATA"] = made
    return Path(made)


def curriculum():
    return folder() / "run.toml"


def digests(path):
    """The digest of each step, as `zdata digest` prints them."""
    steps = json.loads(zdata("plan", path, "--json").stdout)["steps"]
    lines = zdata("digest", path, "--steps", f"1..{steps + 1}").stdout.splitlines()
    return [line.split()[1] for line in lines]


def examples(with_torch):
    """The Python blocks of the README, those that use PyTorch or the others."""
    page = Path(os.environ.get("ZDATA_README", Path(__file__).parent.parent / "README.md")).read_text()
    blocks = [part.split("```")[0] for part in page.split("```python\n")[1:]]
    return [block for block in blocks if ("zdata.torch" in block) == with_torch]
