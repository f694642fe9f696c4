"""Lets a real Prometheus scrape a page, and prints what it then knows as JSON.

    python3 tests/prometheus.py check HOST:PORT OWN   scrapes http://HOST:PORT/metrics, serves at port OWN; 77 without Prometheus
    python3 tests/prometheus.py --install             installs it where that is possible (Debian, root); 77 where not
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request

import browser


def check(target, port):
    program = shutil.which("prometheus")
    if not program:
        print("no Prometheus is installed")
        return browser.NO_PROGRAM
    with tempfile.TemporaryDirectory(prefix="ztrain-prometheus-") as home:
        config = pathlib.Path(home, "prometheus.yml")
        config.write_text(f"global: {{scrape_interval: 2s, scrape_timeout: 2s}}\nscrape_configs: [{{job_name: ztrain, static_configs: [{{targets: ['{target}']}}]}}]\n")
        own = f"127.0.0.1:{port}"
        command = [program, f"--config.file={config}", f"--storage.tsdb.path={home}/data", f"--web.listen-address={own}"]
        with open(f"{home}/log", "wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            for _ in range(600):
                try:
                    query = urllib.parse.urlencode({"query": '{job="ztrain"}'})
                    answer = json.load(urllib.request.urlopen(f"http://{own}/api/v1/query?{query}", timeout=10))
                    targets = json.load(urllib.request.urlopen(f"http://{own}/api/v1/targets", timeout=10))
                except OSError:
                    answer = targets = None
                found = answer and answer["data"]["result"]
                if found and any(one["metric"]["__name__"] == "ztrain_step" for one in found):
                    print(json.dumps([[one["metric"], float(one["value"][1])] for one in found]))
                    return 0
                wrong = targets and [one["lastError"] for one in targets["data"]["activeTargets"] if one["lastError"]]
                # A busy machine may answer late; the next scrape tells.
                if wrong and "deadline exceeded" not in wrong[0]:
                    print("Prometheus refuses the text:", wrong[0])
                    return 1
                time.sleep(0.2)
            print(pathlib.Path(home, "log").read_text()[-2000:])
            return 1
        finally:
            process.kill()
            process.wait()


if __name__ == "__main__":
    command = sys.argv[1:]
    if command == ["--install"]:
        sys.exit(browser.install("Prometheus", lambda: shutil.which("prometheus"), ["prometheus"]))
    if len(command) == 3 and command[0] == "check":
        sys.exit(check(*command[1:]))
    print(__doc__)
    sys.exit(2)
