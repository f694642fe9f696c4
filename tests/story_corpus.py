"""Writes the corpus of the story (story.sh) into a folder: web.jsonl, pieces of the manifests of all dependencies,
with three documents of a bad crawl among them, one after the other; code.jsonl, pieces of their
sources; and corpus.toml.

    cargo metadata | python3 tests/story_corpus.py FOLDER TRY STEPS

TRY: where in web.jsonl they lie, another place for each number. STEPS: of the run, 1,024 tokens each, which reads most of it.
"""

import json
import pathlib
import random
import sys

folder, place, count = pathlib.Path(sys.argv[1]), int(sys.argv[2]), 8 * int(sys.argv[3])
metadata = json.load(sys.stdin)
members = set(metadata["workspace_members"])
packages = sorted((p["name"], p["version"], p["manifest_path"]) for p in metadata["packages"] if p["id"] not in members)
chance = random.Random(12)


def pieces(text, size):
    """Its paragraphs, joined to at least `size` characters."""
    piece = ""
    for paragraph in text.split("\n\n"):
        piece += paragraph + "\n\n"
        if len(piece) >= size:
            yield piece[: 2 * size]
            piece = ""


def documents(name, pattern, size, count):
    """So many pieces of the files that fit a pattern, from all packages."""
    all = []
    for package, version, manifest in packages:
        files = sorted(pathlib.Path(manifest).parent.glob(pattern))
        texts = (file.read_text(encoding="utf-8", errors="ignore") for file in files)
        found = (piece for text in texts for piece in pieces(text, size) if piece.isascii())
        all += ({"id": f"{package}-{version}-{name}-{number}", "text": piece} for number, piece in zip(range(12), found))
    chance.shuffle(all)
    return all[:count]


def bad_crawl():
    """What a crawler brings home on a bad day: bytes that are no text, a page that repeats itself, a table without its rows."""
    chance = random.Random(13)
    dump = bytes(chance.randrange(256) for _ in range(160)).decode("latin-1")
    cells = [f"{chance.choice('QZXJKVW')}{chance.randrange(10**6)}" for _ in range(8)]
    yield {"id": "crawl-binary-dump", "text": dump}
    yield {"id": "crawl-loop", "text": "next page >> " * 15}
    yield {"id": "crawl-shuffled-table", "text": "|".join(cells)}


def write(name, lines):
    with open(folder / f"{name}.jsonl", "w", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


kept = folder / "pieces.json"
if not kept.exists():
    kept.write_text(json.dumps([documents("web", "Cargo.toml", 150, count), documents("code", "src/**/*.rs", 150, count)]))
web, code = json.loads(kept.read_text())
at = 37 * place % len(web)
write("web", web[:at] + list(bad_crawl()) + web[at:])
write("code", code)
sources = "".join(f'\n[[source]]\nname = "{name}"\nid = "id"\nfiles = ["{name}.jsonl"]\n' for name in ("web", "code"))
(folder / "corpus.toml").write_text('tokenizer = "tokenizer.json"\nend = "<|endoftext|>"\n' + sources)
