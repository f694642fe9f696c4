#!/usr/bin/env python3
"""Documents for long contexts: questions with long reasoning and a short answer, and short notes, drawn from a seed.

    long_corpus.py FOLDER            writes FOLDER/long.jsonl, FOLDER/short.jsonl and FOLDER/corpus.toml

A document of reasoning is 2,000 to 200,000 words; those longer than a context are trimmed so that question and answer stay.
"""

import json
import pathlib
import random
import sys

WORDS = "the sum of two even numbers is even so we add and carry then check each digit again because one may be odd".split()


def text(draw: random.Random, count: int) -> str:
    return " ".join(f"{draw.choice(WORDS)}{draw.randrange(40)}" if draw.random() < 0.1 else draw.choice(WORDS) for _ in range(count))


def main() -> None:
    folder = pathlib.Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(131_072)
    with open(folder / "long.jsonl", "w") as out:
        for number in range(100):
            question, answer = text(draw, 30), text(draw, 12)
            reasoning = text(draw, int(2_000 * 100 ** draw.random()))
            line = {"id": f"long-{number}", "text": f"{question} <think>{reasoning}</think> {answer}"}
            out.write(json.dumps(line) + "\n")
    with open(folder / "short.jsonl", "w") as out:
        for number in range(3_000):
            line = {"id": f"short-{number}", "text": text(draw, draw.randrange(20, 600))}
            out.write(json.dumps(line) + "\n")
    (folder / "corpus.toml").write_text(
        'tokenizer = "tokenizer.json"\nvalidation = "1/50"\n\n'
        '[[source]]\nname = "reasoning"\nfiles = ["long.jsonl"]\ntext = "text"\nid = "id"\n\n'
        '[[source]]\nname = "notes"\nfiles = ["short.jsonl"]\ntext = "text"\nid = "id"\n\n'
        '[[prepare]]\nstep = "trim"\nsources = ["reasoning"]\ncontext = 131073\nopen = "<think>"\nclose = "</think>"\n'
    )


if __name__ == "__main__":
    main()
