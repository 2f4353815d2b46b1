"""Runs a job through the faults of a schedule, and judges what it did."""

import contextlib
import heapq
import math
import os
import random
import resource
import signal
import tempfile
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

from .checker import Checker
from .faults import PROGRAMS, SAMPLERS, Fault, schedule
from .life import Life, program_commands
from .place import make_place

_CALM_EVERY = 10  # faults
_UP_S = 60.0  # until all programs are up again, which is mostly the import of JAX
_TAKEN_S = 20.0  # until all replicas have what was published after that, on a loaded machine
_FLEET_S = 2.0  # for which a fleet is watched
_QUIET_S = 15.0  # until a trainer has ended its call
_ZOMBIE_S = 12.0  # until a program whose place was taken has noticed
_ORPHAN_S = 1.5  # until a coordinator has ended with its trainer: a second, and a loaded machine
_GRACE_S = 0.6  # that processes are left alone whose program has lost one
_MESHES = {"trainer": [2, 2], "a": [1, 4], "b": [2, 2], "c": [2, 1]}


class Run:
    """One run. `go` returns the verdict; whatever happens nothing is left behind."""

    def __init__(
        self, seed: int, num_faults: int, kind: str, say: Callable[[str], None] = print
    ) -> None:
        rng = random.Random(f"{seed} run")
        self._seed = seed
        self._kind = kind
        self._say = say
        self._hosted = rng.random() < 0.5
        self._agreement = {
            "commit": rng.choice(("replica", "fleet")),
            "on_straggler": rng.choice(("wait", "drop")),
        }
        self._num_processes = {"trainer": rng.choice((1, 2)), "a": 1, "b": 2, "c": 1}
        self._num_faults = num_faults
        self.checker = Checker(seed, say)
        self._lives: dict[str, Life] = {}
        self._numbers = {name: count(1) for name in (*PROGRAMS, "coordinator")}
        self._zombies: dict[Life, float] = {}  # whose place was taken, until when they may live
        self._due: list[tuple[float, int, Callable[[], Any]]] = []
        self._order = count()
        self._starting: set[str] = set()  # programs that are to be started again
        self.calms: list[float] = []  # seconds until all replicas had what was published then
        self.comebacks: list[float] = []  # seconds until a new sampler had what was there

    def go(self) -> Checker:
        """Does everything; takes about 1.5 s per fault."""
        began = time.monotonic()
        with make_place(self._kind, self._seed) as place, tempfile.TemporaryDirectory() as folder:
            self._place, self._log_dir = place, Path(folder)
            faults = schedule(
                self._seed,
                self._num_faults,
                num_processes=self._num_processes,
                links=place.num_links,
                hosted=self._hosted,
            )
            where = f"coordinator {'with the trainer' if self._hosted else 'alone'}, "
            where += f"trainer of {self._num_processes['trainer']}, {self._agreement | place.data}"
            self._say(
                f"chaos: seed {self._seed}, {self._num_faults} faults in {self._kind}; {where}"
            )
            try:
                for name in (*(() if self._hosted else ("coordinator",)), *PROGRAMS):
                    self._start(name)
                self._calm()
                for number, fault in enumerate(faults, 1):
                    self._apply(number, fault)
                    self._wait(fault.gap_s)
                    if number % _CALM_EVERY == 0 or number == len(faults):
                        self._calm()
            finally:
                for life in (*self._lives.values(), *self._zombies):
                    life.close()
        self._tell(time.monotonic() - began)
        return self.checker

    def _tell(self, seconds: float) -> None:
        checker, counts = self.checker, self.checker.counts
        self._say(
            f"chaos: seed {self._seed}: {self._num_faults} faults in {seconds:.0f} s; "
            f"{counts['publish']} versions published, {counts['update']} trees checked, "
            f"{counts['leave']} calls, the latest {checker.most_late_s:.2f} s after its deadline; "
            f"{counts['excused']} more than 1 s late as the machine was loaded or the process "
            f"stopped ({checker.most_excused_s:.2f} s at most); calm after at most "
            f"{max(self.calms, default=0):.1f} s, a sampler back after at most "
            f"{max(self.comebacks, default=0):.1f} s; {len(checker.violations)} violations"
        )
        self._say(f"chaos: {dict(sorted(counts.items()))}")

    # --- lives

    def _start(self, name: str) -> None:
        number = next(self._numbers[name])
        place = self._place
        options: dict[str, Any] = {"seed": self._seed}
        if name == "coordinator":
            commands, devices = [place.coordinator_command(os.getpid())], 1
        else:
            num_processes = self._num_processes[name]
            devices = _MESHES[name][0] * _MESHES[name][1] // num_processes
            options["mesh"] = _MESHES[name]
            if name == "trainer":
                options["connect"] = place.connect_trainer(self._hosted) | self._agreement
                prefix, role = place.trainer_prefix, "trainer"
            else:
                options["connect"] = place.connect_sampler(name)
                prefix, role = place.sampler_prefix, "sampler"
            commands = program_commands(prefix, role, num_processes, options)
        self._lives[name] = Life(
            name,
            number,
            commands,
            devices=devices,
            log_dir=self._log_dir,
            on_event=self.checker.on_event,
        )

    def _restart_later(self, name: str, delay_s: float) -> None:
        """Ends what is left of a program, and starts it again."""

        def restart() -> None:
            self._lives[name].close()
            self._starting.discard(name)
            self._start(name)

        if name not in self._starting:
            self._starting.add(name)
            self._later(delay_s, restart)

    def _supervise(self) -> None:
        """Notices programs that ended or hang; starts them again."""
        for name, life in self._lives.items():
            hung = self.checker.hung(life)
            for process, call in hung.items():
                self._say(life.dump_stacks(process))
                self.checker.violate(life, f"process {process} hangs in {call}")
                life.faulted = True
            if life.all_alive or name in self._starting:
                continue
            for process in range(len(life.processes)):
                code = life.processes[process].poll()
                if code in (None, 0) or life.faulted:
                    continue
                if name != "coordinator" and process not in life.begun:
                    self.checker.counts["ended within JAX's start"] += 1
                elif life.ended_by_jax(process):  # who died first is judged for itself
                    self.checker.counts["ended by JAX"] += 1
                else:
                    text = f"process {process} ended with {code}:\n{life.log(process)}"
                    self.checker.violate(life, text)
            self._restart_later(name, _GRACE_S)
        for life, until in list(self._zombies.items()):
            if any(map(life.alive, range(len(life.processes)))):
                if time.monotonic() < until:
                    continue
                self.checker.violate(life, "goes on though its place was taken")
                for process in range(len(life.processes)):
                    if life.alive(process):
                        self._say(life.dump_stacks(process))
            life.close()
            del self._zombies[life]

    # --- time

    def _later(self, seconds: float, action: Callable[[], Any]) -> None:
        heapq.heappush(self._due, (time.monotonic() + seconds, next(self._order), action))

    def _wait(self, seconds: float, until: Callable[[], bool] = lambda: False) -> bool:
        """Lets time pass; what is due is done. Whether `until` came true."""
        end = time.monotonic() + seconds
        while True:
            while self._due and self._due[0][0] <= time.monotonic():
                heapq.heappop(self._due)[2]()
            self._supervise()
            if until():
                return True
            if time.monotonic() >= end:
                return False
            time.sleep(0.02)

    def _calm(self) -> None:
        """Lets everything heal and sees that each replica gets what is published then."""
        self._wait(30.0, lambda: not self._due and not self._zombies)
        programs = [name for name in self._lives if name != "coordinator"]
        if not self._wait(_UP_S, lambda: all(self._lives[name].is_up for name in programs)):
            down = [self._lives[name] for name in programs if not self._lives[name].is_up]
            text = "\n".join(map(self.checker.describe, down))
            self.checker.violate(None, f"not up within {_UP_S:.0f} s:\n{text}")
            return
        up = time.monotonic()

        def behind(most_processes: int) -> list[str]:
            names = [x for x in SAMPLERS if self._num_processes[x] <= most_processes]
            return [x for x in names if not self.checker.has_since(self._lives[x], up)]

        # Several processes may first have to find out that they are out of step, and start again.
        in_time = self._wait(_TAKEN_S, lambda: not behind(1))
        if not in_time or not self._wait(_UP_S, lambda: not behind(2)):
            late = [*behind(2), "trainer"]
            text = "\n".join(self.checker.describe(self._lives[name]) for name in late)
            self.checker.violate(None, f"{late[:-1]} got nothing new in time:\n{text}")
            for name in late:  # so that one that is stuck does not stay so
                self._lives[name].faulted = True
                self._restart_later(name, 0.0)
            return
        self.calms.append(time.monotonic() - up)
        if self._agreement["commit"] == "fleet":
            # From now on, as a control stream may have been lost until each had a version.
            lives, since = [self._lives[name] for name in SAMPLERS], time.monotonic()
            self._wait(_FLEET_S)
            drop = self._agreement["on_straggler"] == "drop"
            self.checker.check_agreement(lives, since, drop=drop)
        self._come_back(SAMPLERS[len(self.calms) % len(SAMPLERS)])

    def _come_back(self, name: str) -> None:
        """Starts a sampler anew while nothing is published: it gets the newest version."""
        trainer, former = self._lives["trainer"], self._lives[name]
        trainer.command("quiet", True)
        if not self._wait(_QUIET_S, lambda: self.checker.newest_of(trainer) is not None):
            self.checker.violate(trainer, f"still publishes after {_QUIET_S:.0f} s")
            return
        former.faulted = True
        former.kill()
        self._restart_later(name, 0.0)
        self._wait(_UP_S, lambda: self._lives[name] is not former and self._lives[name].is_up)
        began = time.monotonic()
        newest = self.checker.newest_of(trainer)
        assert newest is not None
        if not self._wait(_TAKEN_S, lambda: self.checker.has(self._lives[name], newest)):
            text = f"came back and got nothing within {_TAKEN_S:.0f} s: {newest} is the newest"
            text += "\n" + self.checker.describe(self._lives[name])
            self.checker.violate(self._lives[name], text)
        self.comebacks.append(time.monotonic() - began)
        trainer.command("quiet", False)

    # --- faults

    def _apply(self, number: int, fault: Fault) -> None:
        # One that is aimed at what is being started again waits for it.
        target = fault.target
        if target == "coordinator" and self._hosted:
            target = "trainer"
        self._wait(_UP_S, lambda: target not in self._starting)
        self._say(f"{number}: {fault}")
        getattr(self, f"_{fault.kind}")(fault)

    def _kill(self, fault: Fault) -> None:
        if fault.target == "coordinator" and self._hosted:
            # Another takes its place by itself, unless the trainer still waits for the first.
            trainer = self._lives["trainer"]
            trainer.faulted = trainer.faulted or not trainer.is_up
            for pid in self._hosted_coordinator():
                os.kill(pid, signal.SIGKILL)
            return
        life = self._lives[fault.target]
        life.faulted = True
        orphans = self._hosted_coordinator() if fault.target == "trainer" else []
        life.kill(fault.process)
        if not life.alive(0):
            self._later(_ORPHAN_S, lambda: self._see_off(life, orphans))
        self._restart_later(fault.target, max(fault.seconds, _GRACE_S if fault.process else 0.0))

    def _see_off(self, life: Life, orphans: list[int]) -> None:
        """Sees that a coordinator ended with the process that started it, unless it is stopped."""
        for pid in orphans:
            with contextlib.suppress(OSError):
                state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
                if state not in "TZ":
                    self.checker.violate(life, "its coordinator goes on without it")

    def _stop(self, fault: Fault) -> None:
        if fault.target == "coordinator" and self._hosted:
            pids = self._hosted_coordinator()
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            self._later(fault.seconds, lambda: [_resume(pid) for pid in pids])
            return
        life = self._lives[fault.target]
        life.stop(fault.process)
        self._later(fault.seconds, lambda: life.resume(fault.process))

    def _usurp(self, fault: Fault) -> None:
        """Another program takes the place of one that seems dead, and then goes on."""
        life = self._lives[fault.target]
        life.faulted = True
        life.stop()
        self._zombies[life] = math.inf
        self._start(fault.target)

        def resume() -> None:
            life.resume()
            self._zombies[life] = time.monotonic() + _ZOMBIE_S

        successor = self._lives[fault.target]

        def resume_when_taken() -> None:
            if successor.is_up or self._lives[fault.target] is not successor:
                self._later(fault.seconds, resume)
            else:
                self._later(0.1, resume_when_taken)

        resume_when_taken()

    def _close(self, fault: Fault) -> None:
        self._lives["trainer"].closing = True
        self._lives["trainer"].command("close")

    def _control_delay(self, fault: Fault) -> None:
        self._place.proxy.delay(fault.amount)
        self._later(fault.seconds, lambda: self._place.proxy.delay(0.0))

    def _control_hold(self, fault: Fault) -> None:
        self._place.proxy.hold(True)
        self._later(fault.seconds, lambda: self._place.proxy.hold(False))

    def _control_cut(self, fault: Fault) -> None:
        self._place.proxy.cut()

    def _duplicate(self, fault: Fault) -> None:
        life = self._lives[fault.target]
        life.command("duplicate", fault.amount)
        self._later(fault.seconds, lambda: life.command("duplicate", 0.0))

    def _clock(self, fault: Fault) -> None:
        self._lives[fault.target].command("clock", fault.amount)

    def _memory(self, fault: Fault) -> None:
        """Leaves a sampler little address space, which may well end it."""
        life = self._lives[fault.target]
        life.faulted = True
        for process in life.processes:
            if process.poll() is None:
                used = int(Path(f"/proc/{process.pid}/statm").read_text().split()[0])
                limit = used * resource.getpagesize() + int(fault.amount)
                resource.prlimit(process.pid, resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))

        def lift() -> None:
            unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
            for process in life.processes:
                if process.poll() is None:
                    resource.prlimit(process.pid, resource.RLIMIT_AS, unlimited)

        self._later(fault.seconds, lift)

    def _link(self, fault: Fault) -> None:
        self._place.set_up(fault.target, False)
        self._later(fault.seconds, lambda: self._place.set_up(fault.target, True))

    def _hosted_coordinator(self) -> list[int]:
        """The child of the trainer that is its coordinator."""
        pid = self._lives["trainer"].processes[0].pid
        found = []
        for task in Path(f"/proc/{pid}/task").glob("*"):
            for child in (task / "children").read_text().split():
                command = Path(f"/proc/{child}/cmdline").read_bytes()
                if b"tpu_sync_rl.coordinator" in command:
                    found.append(int(child))
        return found


def _resume(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)
