"""Holds chat templates as `zdata` renders and encodes them against `transformers`.

    peer_chat.py cases                                   the cases of src/recipe/chat/cases.json, rendered again
    peer_chat.py ids ZDATA TOKENIZER.json TEMPLATE...    stores of chats with and without tools by these templates

A TEMPLATE is a .jinja file; the control tokens of the tokenizer stand in for those that it writes. Needs Python with
transformers and jinja2. What `transformers` refuses, `zdata` has to refuse too.
"""

import array
import datetime
import glob
import gzip
import json
import os
import subprocess
import sys
import tempfile

import transformers.utils.chat_template_utils as chats
from transformers import PreTrainedTokenizerFast

DAY = "2024-07-26"
FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "src", "recipe", "chat")


class Day(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return cls.fromisoformat(DAY)


chats.datetime = Day


def cases():
    with open(os.path.join(FOLDER, "cases.json"), encoding="utf-8") as file:
        all_cases = json.load(file)
    for case in all_cases:
        with open(os.path.join(FOLDER, case["template"] + ".jinja"), encoding="utf-8") as file:
            template = chats._compile_jinja_template(file.read())
        record = case["record"]
        try:
            text = template.render(messages=record["messages"], tools=record.get("tools"), documents=None,
                                   add_generation_prompt=False, **case["tokens"])
        except Exception:
            text = None
        assert text == case["text"], (case, text)
    print(len(all_cases), "cases, no difference")


def records():
    with open(os.path.join(FOLDER, "cases.json"), encoding="utf-8") as file:
        found = {json.dumps(case["record"]): case["record"] for case in json.load(file)}
    for number, record in enumerate(found.values()):
        for control in ("", "<|im_end|> ", "</s>", "<|user|>"):
            messages = [dict(message) for message in record["messages"]]
            if isinstance(messages[0]["content"], str):
                messages[0]["content"] += control
            yield {"id": f"{number}{control}", "messages": messages, "tools": record.get("tools")}


def stored(zdata, folder, keys):
    """The ids of the documents of a store, in order."""
    with open(os.path.join(folder, "corpus.toml"), "w", encoding="utf-8") as file:
        file.write(f'tokenizer = "tokenizer.json"\nvalidation = 0\nunit = 64\non_error = "skip"\n[[source]]\nname = "chat"\n'
                   f'files = ["chats.jsonl"]\nid = "id"\nchat = "messages"\ntools = "tools"\n{keys}')
    store, out = os.path.join(folder, "store"), os.path.join(folder, "out")
    for command in (["build", os.path.join(folder, "corpus.toml")], ["export", store, "--format", "olmo"]):
        subprocess.run([zdata, *command, "--out", out if "export" in command else store], check=True)
    found = []
    for table in sorted(glob.glob(os.path.join(out, "chat", "train", "*.csv.gz"))):
        with gzip.open(table, "rt") as file:
            ends = [[int(number) for number in line.split(",")[:2]] for line in file]
        with open(table.removesuffix(".csv.gz") + ".npy", "rb") as file:
            raw = file.read()
        tokens = array.array({2: "H", 4: "I"}[len(raw) // ends[-1][1]], raw).tolist()
        found += [tokens[start:end] for start, end in ends]
    return found


def ids(zdata, tokenizer_file, templates):
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=tokenizer_file, bos_token="<s>", eos_token="</s>")
    rows = list(records())
    for template_file in templates:
        with open(template_file, encoding="utf-8", newline="") as file:
            template = file.read()
        wanted = []
        for row in rows:
            try:
                wanted.append(tokenizer.apply_chat_template(
                    row["messages"], tools=row["tools"], chat_template=template, tokenize=True, return_dict=False))
            except Exception:
                pass
        with tempfile.TemporaryDirectory() as folder:
            with open(os.path.join(folder, "chats.jsonl"), "w", encoding="utf-8") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)
            with open(os.path.join(folder, "tokenizer_config.json"), "w", encoding="utf-8") as file:
                json.dump({"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}, file)
            tokenizer.backend_tokenizer.save(os.path.join(folder, "tokenizer.json"))
            keys = 'chat_template = "tokenizer_config.json"\n'
            keys += f'chat_date = "{DAY}"\n' if "strftime_now" in template else ""
            found = stored(zdata, folder, keys)
        differ = [pair for pair in zip(found, wanted) if pair[0] != pair[1]]
        assert len(found) == len(wanted) and not differ, (len(found), len(wanted), differ[:1])
        print(f"{os.path.basename(template_file)}: {len(found)} documents with the same ids, {len(rows) - len(found)} refused by both")


if __name__ == "__main__":
    if sys.argv[1:] == ["cases"]:
        cases()
    elif len(sys.argv) > 4 and sys.argv[1] == "ids":
        ids(*sys.argv[2:4], sys.argv[4:])
    else:
        sys.exit(__doc__)
