"""Asks a control plane for its list of jobs, ten times a second, until its standard input ends.

Prints a JSON list of pairs: when it asked, in Unix seconds, and the seconds that the answer took. It is a process of
its own, so that what plays the jobs does not hold it up.
"""

from __future__ import annotations

import json
import sys
import threading
import time

import httpx2


def main() -> None:
    """Run; the argument is the control plane's URL. An error counts as a wait of an hour."""
    asked: list[tuple[float, float]] = []
    over = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
    with httpx2.Client(base_url=sys.argv[1], timeout=60.0) as http:
        while not over.wait(0.1):
            at, begin = time.time(), time.perf_counter()
            try:
                good = http.get("/jobs").status_code == 200
            except httpx2.TransportError:
                good = False
            asked.append((at, time.perf_counter() - begin if good else 3600.0))
    print(json.dumps(asked))


if __name__ == "__main__":
    main()
