#!/usr/bin/env python3
"""The curves of a run in MLflow: a run that goes on goes on there.

    ztrain --curriculum X.toml --metrics-exec 'python3 trainer/python/to_mlflow.py --experiment pretraining'

Reads one JSON object a line, as `--metrics-exec` writes them: `step` and curves by name. The server is MLFLOW_TRACKING_URI's;
without it everything is written to RUN/mlruns. RUN/mlflow.json has the run's id. Needs the package mlflow or mlflow-skinny.
"""

import argparse
import json
import os
import pathlib
import re
import sys


def batches(lines):
    """Curves by step: what came at the same time goes in one request."""
    for line in lines:
        values = json.loads(line)
        yield values.pop("step"), values


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", default=os.environ.get("ZTRAIN_RUN"), help="the run's folder [default: ZTRAIN_RUN, as ztrain sets it]")
    parser.add_argument("--experiment", default="ztrain")
    parser.add_argument("--name", help="what the run is called [default: its folder's name]")
    args = parser.parse_args()
    if not args.run:
        parser.error("no run: name its folder by --run, or start this by ztrain --metrics-exec")
    folder = pathlib.Path(args.run).resolve()
    if "MLFLOW_TRACKING_URI" not in os.environ:
        os.environ["MLFLOW_TRACKING_URI"] = (folder / "mlruns").as_uri()
        # Newer releases ask for a database; files are what a laptop has.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")

    import mlflow  # only now: it reads its environment when it is imported
    from mlflow.entities import Metric
    from mlflow.tracking import MlflowClient

    known = folder / "mlflow.json"
    mlflow.set_experiment(args.experiment)
    if known.exists():
        run = mlflow.start_run(run_id=json.loads(known.read_text())["run_id"])
    else:
        run = mlflow.start_run(run_name=args.name or folder.name)
        known.write_text(json.dumps({"run_id": run.info.run_id}) + "\n")
        curriculum = folder / "run.toml"
        if curriculum.exists():
            mlflow.log_text(curriculum.read_text(), "run.toml")
    client = MlflowClient()
    for step, values in batches(sys.stdin):
        now = mlflow.utils.time.get_current_time_millis()
        # MLflow's names have no other characters.
        names = {name: re.sub(r"[^A-Za-z0-9_\-. :/]", "_", name) for name in values}
        metrics = [Metric(names[name], float(value), now, step) for name, value in values.items()]
        for begin in range(0, len(metrics), 1000):
            client.log_batch(run.info.run_id, metrics=metrics[begin : begin + 1000])
    mlflow.end_run()


if __name__ == "__main__":
    main()
