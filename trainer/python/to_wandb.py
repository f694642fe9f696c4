#!/usr/bin/env python3
"""The curves of a run in Weights & Biases: a run that goes on goes on there.

    ztrain --curriculum X.toml --metrics-exec 'python3 trainer/python/to_wandb.py --project pretraining'

Reads one JSON object a line, as `--metrics-exec` writes them: `step` and curves by name. WANDB_MODE=offline writes to RUN/wandb
alone; `wandb sync RUN/wandb/offline-run-*` sends that later. RUN/wandb.json has the run's id. Needs the package wandb.
"""

import argparse
import json
import os
import pathlib
import sys
import uuid


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", default=os.environ.get("ZTRAIN_RUN"), help="the run's folder [default: ZTRAIN_RUN, as ztrain sets it]")
    parser.add_argument("--project", default="ztrain")
    parser.add_argument("--name", help="what the run is called [default: its folder's name]")
    args = parser.parse_args()
    if not args.run:
        parser.error("no run: name its folder by --run, or start this by ztrain --metrics-exec")
    folder = pathlib.Path(args.run).resolve()

    import wandb

    known = folder / "wandb.json"
    if known.exists():
        run_id = json.loads(known.read_text())["id"]
    else:
        run_id = uuid.uuid4().hex[:12]
        known.write_text(json.dumps({"id": run_id}) + "\n")
    curriculum = folder / "run.toml"
    config = {"curriculum": curriculum.read_text()} if curriculum.exists() else {}
    run = wandb.init(
        project=args.project, id=run_id, name=args.name or folder.name, dir=folder, config=config, resume="allow"
    )
    for line in sys.stdin:
        values = json.loads(line)
        run.log(values, step=values.pop("step"))
    run.finish()


if __name__ == "__main__":
    main()
