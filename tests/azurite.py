"""A real server of Azure Blob Storage for tests/remote.rs (Azurite, from npm): a container with the files of a folder, until its input ends.

    python3 tests/azurite.py FOLDER PORT  serves at PORT, and prints it once it is ready; 77 if Azurite is not installed
    python3 tests/azurite.py --install    installs it where npm can; exit 0 it is there, 77 it is not
"""

import base64
import ctypes
import email.utils
import hashlib
import hmac
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request

VERSION = "3.37.0"
NO_PROGRAM = 77
CACHE = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "ztrain"
HOME = CACHE / f"azurite-{VERSION}"
PROGRAM = HOME / "node_modules/azurite/dist/src/blob/main.js"
# The account that every Azurite has.
ACCOUNT = "devstoreaccount1"
KEY = base64.b64decode("Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==")


def install():
    if PROGRAM.exists():
        print("Azurite is there:", PROGRAM)
        return 0
    if not shutil.which("npm") or not shutil.which("node"):
        print("Azurite is not there, and no npm to install it")
        return NO_PROGRAM
    CACHE.mkdir(parents=True, exist_ok=True)
    scratch = tempfile.mkdtemp(dir=CACHE)
    # Bounded, so that a machine without a network is not waited for.
    command = ["timeout", "240", "npm", "install", "--prefix", scratch, "--omit=dev", "--no-audit", "--no-fund", "--fetch-retries=1"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    try:
        # Renamed when it is whole, so concurrent or killed runs do no harm.
        if subprocess.call([*command, f"azurite@{VERSION}"], **quiet) == 0:
            os.rename(scratch, HOME)
    except OSError:
        pass
    shutil.rmtree(scratch, ignore_errors=True)
    print("installed Azurite" if PROGRAM.exists() else "npm does not install Azurite")
    return 0 if PROGRAM.exists() else NO_PROGRAM


def put(port, path, query, body, **headers):
    """A request signed with the account's key (the rules of "Authorize with Shared Key")."""
    headers = {"x-ms-date": email.utils.formatdate(usegmt=True), "x-ms-version": "2021-08-06", **headers}
    path = f"/{ACCOUNT}/{urllib.parse.quote(path)}"
    named = "".join(f"{name}:{headers[name]}\n" for name in sorted(headers))
    asked = "".join(f"\n{name}:{query[name]}" for name in sorted(query))
    length = str(len(body)) if body else ""
    text = f"PUT\n\n\n{length}\n\n\n\n\n\n\n\n\n{named}/{ACCOUNT}{path}{asked}"
    signature = base64.b64encode(hmac.new(KEY, text.encode(), hashlib.sha256).digest()).decode()
    headers["Authorization"] = f"SharedKey {ACCOUNT}:{signature}"
    url = f"http://127.0.0.1:{port}{path}?{urllib.parse.urlencode(query)}"
    request = urllib.request.Request(url, data=body, headers=headers, method="PUT")
    # Without a type the library names one, which would have to be signed.
    request.add_header("Content-Type", "")
    urllib.request.urlopen(request, timeout=30).read()


def main(root, port):
    if not PROGRAM.exists():
        return NO_PROGRAM
    flags = ["--inMemoryPersistence", "--silent", "--skipApiVersionCheck", "--disableTelemetry", "--blobPort", port]
    quiet = subprocess.DEVNULL
    # The server ends with this process, however that ends (PR_SET_PDEATHSIG, SIGKILL).
    dies = ctypes.CDLL(None).prctl
    command = ["node", str(PROGRAM), *flags]
    server = subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet, preexec_fn=lambda: dies(1, 9))
    try:
        for _ in range(600):
            # An old Node cannot run it.
            if server.poll() is not None:
                return NO_PROGRAM
            try:
                # Everybody may read, so that tests look at blobs without a signature.
                put(port, "bucket", {"restype": "container"}, b"", **{"x-ms-blob-public-access": "container"})
                break
            except (urllib.error.URLError, ConnectionError) as error:
                if isinstance(error, urllib.error.HTTPError):
                    raise
                time.sleep(0.1)
        else:
            return NO_PROGRAM
        for folder, _, names in os.walk(root):
            for name in names:
                path = pathlib.Path(folder, name)
                key = "bucket/" + str(path.relative_to(root))
                put(port, key, {}, path.read_bytes(), **{"x-ms-blob-type": "BlockBlob"})
        print(port, flush=True)
        sys.stdin.read()
    finally:
        server.kill()
    return 0


if __name__ == "__main__":
    sys.exit(install() if sys.argv[1] == "--install" else main(*sys.argv[1:]))
