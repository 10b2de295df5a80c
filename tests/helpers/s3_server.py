"""An S3 server in a process of its own, and a proxy before it that answers badly when it is told to."""

import http.client
import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

BUCKET, SECRET = "s3://bucket", "SeCrEt"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_DEFAULT_REGION": "us-east-1"}
NOT_FORWARDED = {"connection", "transfer-encoding", "content-length", "keep-alive", "server", "date"}


@contextmanager
def server():
    """A server of moto's, of which the port is given once it answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    pages = {**os.environ, "MOTO_S3_DEFAULT_MAX_KEYS": "7"}  # so that a listing takes several
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=pages)
    try:
        until = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                assert process.poll() is None
                assert time.monotonic() < until
                time.sleep(0.05)
        yield port
    finally:
        process.terminate()
        process.wait(30)


class Proxy(ThreadingHTTPServer):
    """Forwards what it is asked, one request at a time, and remembers it; faults are used up one by one."""

    daemon_threads = True

    def __init__(self, behind):
        super().__init__(("127.0.0.1", 0), Forward)
        self.behind, self.one = behind, threading.Lock()
        self.seen, self.faults = [], []

    def fault(self, method, name):
        """Take the next fault of a request, if it is for that."""
        found = next((fault for fault in self.faults if fault[0] == method and fault[1] in name), None)
        if found is not None:
            self.faults.remove(found)
        return found and found[2]

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}"


class Forward(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def forward(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        with self.server.one:
            self.server.seen.append((self.command, self.path.partition("?")[0]))
            fault = self.server.fault(self.command, self.path)
        if isinstance(fault, float):
            time.sleep(fault)
        if isinstance(fault, int):
            return self.reply(fault, [], f"<Error><Code>{fault}</Code><Message>injected</Message></Error>".encode())
        with self.server.one:
            connection = http.client.HTTPConnection("127.0.0.1", self.server.behind, timeout=60)
            connection.request(self.command, self.path, body, dict(self.headers))
            answer = connection.getresponse()
            data, headers = answer.read(), [h for h in answer.getheaders() if h[0].lower() not in NOT_FORWARDED]
            length = answer.getheader("Content-Length")
            connection.close()
        if fault == "lost":
            return self.reply(500, [], b"")
        return self.reply(answer.status, headers, data, length, cut=fault == "cut")

    def reply(self, status, headers, data, length=None, cut=False):
        try:
            self.send_response(status)
            for name, value in headers:
                self.send_header(name, value)
            self.send_header("Content-Length", length if self.command == "HEAD" and length else str(len(data)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data[: len(data) // 2] if cut else data)
        except OSError:
            cut = True  # whoever asked has gone
        self.close_connection = self.close_connection or cut

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = forward

    def log_message(self, *args):
        pass


@contextmanager
def proxy(behind):
    """A proxy in a thread."""
    with Proxy(behind) as made:
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield made
        finally:
            made.shutdown()
            thread.join()


def put(place, folder):
    """Upload a folder."""
    place.upload_files(folder, [p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()])


def one_sentence(error):
    """Whether a message is one sentence, without credentials."""
    return "\n" not in str(error) and str(error).endswith(".") and SECRET not in str(error)
