"""A stand-in for an engine's server, for tests of what starts and ends servers. Run as a program."""

import argparse
import http.server
import json
import os
import signal
import subprocess
import sys
import time

STUBBORN_CHILD = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        known = {"/health": "", "/v1/models": {"data": [{"id": self.server.model, "max_model_len": 4096}]}}
        known["/version"] = {"version": "9.9"}
        if self.server.no_health:
            del known["/health"]
        if self.headers.get("Authorization") != self.server.authorization or self.path not in known:
            self.send_error(401 if self.path in known else 404)
            return
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(known[self.path]).encode() if known[self.path] else b"")

    def log_message(self, *_: object) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", default="m")
    parser.add_argument("--mode", default="serve")
    parser.add_argument("--key")
    parser.add_argument("--no-health", action="store_true")
    options = parser.parse_args()
    if options.mode == "die":
        raise RuntimeError("the model does not fit")
    if options.mode == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if options.mode == "mute":
        print("still loading", flush=True)
        time.sleep(600)
    if options.mode == "child":
        print(subprocess.Popen([sys.executable, "-c", STUBBORN_CHILD]).pid, flush=True)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", options.port), Handler)
    server.no_health = options.no_health
    server.model, server.authorization = options.model, f"Bearer {options.key}" if options.key else None
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    server.serve_forever()


if __name__ == "__main__":
    main()
