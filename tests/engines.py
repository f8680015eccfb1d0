"""Scripted engines behind somebody who starts them again: what a run with external engines counts on."""

import asyncio
import os
import random
import socket
import threading
import time

import requests

import light
import scripted_engine

NONSENSE = ("missing_logprobs", "null_logprobs", "nan_logprobs", "short_logprobs", "foreign_ids")


def free_port():
    """Below those that the kernel gives to connections: none of these takes it while the engine is down."""
    while True:
        with socket.socket() as s:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                s.bind(("127.0.0.1", random.randrange(10000, 20000)))
                return s.getsockname()[1]
            except OSError:
                pass


def serve(words):
    for number in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), number)
    asyncio.run(scripted_engine.serve(scripted_engine.parse([*words, "--die-with-parent", str(os.getppid())])))


class Engines:
    """n engines, each at an address of its own that it keeps, forked from a server that has imported torch: one is back within a
    moment, or once `again` is true. `deaths`: how many were found dead."""

    def __init__(self, n, again=True, **options):
        self.words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        self.again, self.deaths, self.ended = again, 0, False
        self.ports = [free_port() for _ in range(n)]
        self.urls = [f"http://127.0.0.1:{port}" for port in self.ports]
        self.processes = [self.start(i) for i in range(n)]
        for port in self.ports:
            while socket.socket().connect_ex(("127.0.0.1", port)):
                time.sleep(0.01)
        self.thread = threading.Thread(target=self.watch, daemon=True)
        self.thread.start()

    def start(self, i):
        process = light.server().Process(target=serve, args=([*self.words, "--port", str(self.ports[i])],))
        process.start()
        return process

    def watch(self):
        while not self.ended:
            for i, process in enumerate(self.processes):
                if process and not process.is_alive():
                    process.join()
                    self.deaths += 1
                    self.processes[i] = None
                if self.processes[i] is None and self.again:
                    self.processes[i] = self.start(i)
            time.sleep(0.02)

    def signal(self, i, how):
        try:
            os.kill(self.processes[i].pid, how)
        except (ProcessLookupError, AttributeError):
            pass                       # it is dead already

    def script(self, i, **orders):
        """See scripted_engine.Engine.script. One that is down needs no order."""
        try:
            requests.post(f"{self.urls[i]}/script", json=orders, timeout=2)
        except requests.RequestException:
            pass

    def report(self, i):
        """Its counters; {} while it is down."""
        try:
            return requests.get(f"{self.urls[i]}/script", timeout=2).json()
        except requests.RequestException:
            return {}

    def stop(self):
        self.ended = True
        self.thread.join(30)
        for process in filter(None, self.processes):
            process.kill()
            process.join(10)
