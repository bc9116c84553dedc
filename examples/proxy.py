"""A proxy before an engine that prefills and one that decodes: two requests for each that comes.

python examples/proxy.py --port 8192 --prefill http://P1:8000 --decode http://D1:8000
"""

import argparse
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.request import Request, urlopen


class Proxy(BaseHTTPRequestHandler):
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        first = {**asked, "kv_transfer_params": {"do_remote_decode": True}, "max_tokens": 1}
        first |= {"stream": False, "stream_options": None, "max_completion_tokens": None}
        with self.ask(given.prefill, first) as prefilled:
            params = json.load(prefilled)["kv_transfer_params"]
        with self.ask(given.decode, {**asked, "kv_transfer_params": params}) as answer:
            self.send_response(answer.status)
            self.send_header("Content-Type", answer.headers["Content-Type"])
            self.end_headers()
            while part := answer.read1():
                self.wfile.write(part)

    def ask(self, engine, body):
        request = Request(engine + self.path, json.dumps(body).encode())
        request.add_header("Content-Type", "application/json")
        return urlopen(request, timeout=600)


parser = argparse.ArgumentParser(description=__doc__)
for option in ("--port", "--prefill", "--decode"):
    parser.add_argument(option, required=True)
given = parser.parse_args()
ThreadingHTTPServer(("127.0.0.1", int(given.port)), Proxy).serve_forever()
