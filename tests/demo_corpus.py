"""Writes the demo's corpus.toml: text that every machine which built this project has.

Reads `cargo metadata` on standard input. Code: the sources of the direct dependencies. Prose: the Markdown of all
dependencies. Manifests: their Cargo.toml files.
"""

import json
import pathlib
import sys

metadata = json.load(sys.stdin)
members = set(metadata["workspace_members"])
direct = {dep["pkg"] for node in metadata["resolve"]["nodes"] if node["id"] in members for dep in node["deps"]}
folders = {p["id"]: pathlib.Path(p["manifest_path"]).parent for p in metadata["packages"] if p["id"] not in members}


def source(name, packages, pattern):
    found = sorted(f"{folders[p]}/{pattern}" for p in packages if next(folders[p].glob(pattern), None))
    listed = "".join(f"  {json.dumps(glob)},\n" for glob in found)
    return f'\n[[source]]\nname = "{name}"\nformat = "text"\nfiles = [\n{listed}]\n'


print('tokenizer = "tokenizer.json"\nend = "<|endoftext|>"\nvalidation = "1/100"\non_error = "skip"')
print(source("code", direct - members, "src/**/*.rs"))
print(source("prose", folders, "**/*.md"))
print(source("manifests", folders, "Cargo.toml"))
