"""A real S3 server process for tests/remote.rs: serves a bucket with the files of a folder until its input ends.

    s3.py FOLDER        prints the port it listens on once it is ready
"""

import os
import sys

import boto3
from moto.server import ThreadedMotoServer

os.environ.update(AWS_ACCESS_KEY_ID="test", AWS_SECRET_ACCESS_KEY="test", AWS_DEFAULT_REGION="us-east-1")
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
host, port = server.get_host_and_port()
bucket = boto3.resource("s3", endpoint_url=f"http://{host}:{port}").create_bucket(Bucket="bucket")
root = sys.argv[1]
for folder, _, names in os.walk(root):
    for name in names:
        path = os.path.join(folder, name)
        bucket.upload_file(path, os.path.relpath(path, root))
print(port, flush=True)
sys.stdin.read()
os._exit(0)
