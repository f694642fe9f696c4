"""What a tracker has of a run, as JSON: a list of [step, loss], by its own package.

    python3 tests/trackers.py mlflow RUN
    python3 tests/trackers.py wandb RUN     of files that wait to be sent; the runs that they are for stand in the last line
"""

import json
import os
import pathlib
import sys


def mlflow_has(run):
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=(run / "mlruns").resolve().as_uri())
    run_id = json.loads((run / "mlflow.json").read_text())["run_id"]
    history = client.get_metric_history(run_id, "total/loss")
    return [[one.step, one.value] for one in history], [run_id]


def records(data):
    """The records of a file of W&B: a log of LevelDB's format behind seven bytes."""
    at, block, whole = 7, 32768, b""
    while at + 7 <= len(data):
        if block - at % block < 7:
            at += block - at % block
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # the only part, or the last one
            yield whole
            whole = b""


def wandb_has(run):
    from wandb.proto import wandb_internal_pb2

    rows, runs = [], set()
    for file in sorted((run / "wandb").glob("offline-run-*/*.wandb")):
        for data in records(file.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "run":
                runs.add(record.run.run_id)
            if record.WhichOneof("record_type") == "history":
                items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
                if "total/loss" in items:
                    step = record.history.step.num if record.history.HasField("step") else items["_step"]
                    rows.append([step, items["total/loss"]])
    return rows, sorted(runs)


if __name__ == "__main__":
    which = {"mlflow": mlflow_has, "wandb": wandb_has}
    if len(sys.argv) != 3 or sys.argv[1] not in which:
        print(__doc__)
        sys.exit(2)
    rows, runs = which[sys.argv[1]](pathlib.Path(sys.argv[2]))
    print(json.dumps(rows))
    print(json.dumps(runs))
