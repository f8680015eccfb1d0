"""Notices within --watchdog-timeout that a process of the run stopped making progress, writes down where each one waits, and ends
the run with that one's name.

The driver, the rollout manager and each training rank have one. Every process looks after itself while it is at work for another
one, and after the others' signs of life: files RUN/logs/NAME.alive, for all who see that folder.
"""

import contextlib
import faulthandler
import glob
import json
import os
import signal
import socket
import sys
import threading
import time

STATUS = 75


class Watchdog:
    """finish(why): how the process ends; without it, at once. more(file): writes what the stacks of threads do not show.
    tick: seconds between two signs of life."""

    def __init__(self, who, args, finish=None, more=None, tick=5.0):
        self.who, self.limit, self.finish, self.more = who, args.watchdog_timeout, finish, more
        self.tick = min(self.limit / 4, tick)
        self.part, self.done, self.total = None, 0, 0
        self.folder = os.path.join(args.run_dir, "logs")
        self.jobs, self.last, self.ended = [], time.time(), False

    def start(self):
        os.makedirs(self.folder, exist_ok=True)
        self.started, self.stacks = time.time(), open(os.path.join(self.folder, f"{self.who}.stacks"), "w")
        faulthandler.register(signal.SIGUSR1, self.stacks)       # another one's watchdog asks where this process waits
        threading.Thread(target=self.watch, daemon=True).start()

    @contextlib.contextmanager
    def at(self, job):
        """While another process waits for this job, something has to go on in it: `alive` says so."""
        self.jobs.append(job)
        self.alive()
        try:
            yield
        finally:
            self.jobs.remove(job)
            self.part = None
            self.alive()

    def alive(self):
        self.last = time.time()

    def begin(self, part, total):
        """A part of the job, of which `count` counts. The thread writes it down with the next sign of life, so that counting
        costs nothing, and the terminal can show it while this process answers no call."""
        self.part, self.done, self.total = part, 0, total
        self.alive()

    def count(self):
        self.done += 1
        self.alive()

    # ---- the thread ---------------------------------------------------------------------------------------
    def watch(self):
        before = time.time()
        while not self.ended:
            late, before = time.time() - before > 2 * self.tick + 1, time.time()
            with contextlib.suppress(OSError):                   # a full disk is no reason to end
                self.sign()
            if said(self.folder, self.started):
                return                                           # another one ends the run
            if late:                                             # all of them stood still: the machine slept
                self.alive()
            why = None if late else self.problem()
            if why:
                return self.end(why)
            time.sleep(self.tick)

    def sign(self):
        path = os.path.join(self.folder, f"{self.who}.alive")
        part = f"{self.part} {self.done} of {self.total}" if self.part else ""
        with open(path + ".tmp", "w") as f:
            json.dump({"who": self.who, "host": socket.gethostname(), "pid": os.getpid(), "jobs": self.jobs[:1], "part": part,
                       "last": self.last}, f)
        os.replace(path + ".tmp", path)

    def others(self):
        """[(what it says, seconds since)] of the processes that have signed since this one began."""
        found = []
        for path in glob.glob(os.path.join(glob.escape(self.folder), "*.alive")):
            with contextlib.suppress(OSError, ValueError), open(path) as f:
                signed, says = os.fstat(f.fileno()).st_mtime, json.load(f)
                if says["who"] != self.who and signed > self.started:
                    found.append((says, time.time() - signed))
        return found

    def problem(self):
        """Why the run cannot go on, or None."""
        silent, limit = time.time() - self.last, f"for --watchdog-timeout {self.limit:g} s"
        if self.jobs and silent > self.limit:
            return f"{self.who}: no progress {limit} in {self.jobs[0]}"
        others = self.others()
        for says, age in others:
            if age > self.limit:
                return f"{says['who']}: no sign of life {limit}; its process {says['pid']} on {says['host']} is stopped or hangs"
        if self.finish and others and all(not says["jobs"] and time.time() - says["last"] > self.limit for says, _ in others):
            return f"{self.who}: has asked nobody for anything {limit}"

    def end(self, why):
        with contextlib.suppress(OSError), open(os.path.join(self.folder, "watchdog.txt"), "a") as f:
            f.write(why + "\n")
        print(f"error: {why}; where each process waits: {self.folder}/*.stacks", file=sys.stderr, flush=True)
        for says, _ in self.others():
            if says["host"] == socket.gethostname():
                with contextlib.suppress(OSError):
                    os.kill(says["pid"], signal.SIGUSR1)
        faulthandler.dump_traceback(self.stacks)
        if self.more:
            with contextlib.suppress(Exception):
                self.more(self.stacks)
        self.stacks.flush()
        time.sleep(0.5)                                          # for theirs
        if self.finish:
            self.finish(why)
            time.sleep(90)                                       # for cleaning up
        os._exit(STATUS)


def doing(folder, who):
    """What a process was at, at its last sign of life: 'the training of step 5: micro-batch 3 of 16'. "" for nothing, or for one
    that has not signed lately. folder: RUN/logs, which other nodes may not share."""
    path = os.path.join(folder, f"{who}.alive")
    with contextlib.suppress(OSError, ValueError), open(path) as f:
        if time.time() - os.fstat(f.fileno()).st_mtime < 15:
            says = json.load(f)
            return ": ".join([*says["jobs"], *([says["part"]] if says["part"] else [])])
    return ""


def said(folder, since):
    """What a watchdog ended the run for; None, if none has since then. folder: RUN/logs."""
    path = os.path.join(folder, "watchdog.txt")
    with contextlib.suppress(OSError):
        if os.path.getmtime(path) >= since:
            with open(path) as f:
                return f.read().splitlines()[-1]
