"""One run from its header to its end: begun or taken up again, measured, checked, closed.

What every experiment has in common. An experiment prepares its arms, lets its gate pass and hands a
`Trial` to `conduct`. Every group of repetitions is on disk before the next is measured, so an
interruption costs one group at most, and a run says of itself whether it is complete.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from nanoserve.bench import machine
from nanoserve.bench.findings import AACheck, aa_check, aa_values
from nanoserve.bench.measure import Group, Rounds, Rules, Sample, plan_rounds, run_rounds, warm_up
from nanoserve.bench.record import (
    SCHEMA,
    Journal,
    Record,
    Run,
    full_name,
    read_runs,
    sample_record,
)
from nanoserve.bench.session import Options, Screen


class VoidError(RuntimeError):
    """The run means nothing; the message says why. `run`: as recorded, None if nothing was."""

    def __init__(self, message: str, run: Run | None = None) -> None:
        super().__init__(message)
        self.run = run


@dataclass(frozen=True, slots=True, kw_only=True)
class AAArms:
    """The two arms that are the same, and the part of a repetition by which they are compared."""

    arm: str
    same_arm: str
    part: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """What a round of each group costs and how many there are, where an experiment knows that.

    For arms that last minutes: running each once to find out would double what they cost.
    """

    costs_s: Mapping[str, float]
    rounds: Mapping[str, Rounds]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What an experiment hands over to be measured.

    `identity` goes into every record (executor, kernels, dtype, weights, hash of the tokens),
    `setup` into the header: two runs whose identity and setup are equal can be one, continued.
    `header` is what else the header holds and need not be equal: ceilings, predictions. Without a
    `pace` arms are warmed up by rule, and the rounds planned from what that took.
    """

    experiment: str
    name: str
    groups: Sequence[Group]
    rules: Rules
    aa: AAArms
    synchronize: Callable[[], object]
    identity: Record
    setup: Record = field(default_factory=dict)
    header: Record = field(default_factory=dict)
    pace: Pace | None = None

    @property
    def full_name(self) -> str:
        """`name`, and what else tells the run's file from others."""
        return full_name(self.name, self.identity)


def results_path(options: Options, experiment: str, name: str) -> Path:
    """`<out>/<machine>/<experiment>-<name>.jsonl`; quick runs have files of their own."""
    ending = "-quick.jsonl" if options.quick else ".jsonl"
    return options.out / machine.slug() / f"{experiment}-{name}{ending}"


def check_out(options: Options) -> None:
    """Raise ValueError now, before minutes of measuring, if `--out` cannot be written to."""
    probe = options.out / machine.slug() / ".writable"
    with Journal(probe):
        pass
    probe.unlink()


def conduct(trial: Trial, options: Options, screen: Screen) -> Run:
    """Warm up, measure and record until an attempt passes its A/A check: twice at most.

    With `--resume` the last run of the file is taken up where it stopped, or given back if it is
    complete. Raises VoidError with the run, recorded as void, if equal arms were told apart twice.
    """
    pace = trial.pace
    costs_s = warm_up_groups(trial, screen) if pace is None else dict(pace.costs_s)
    rounds = plan_rounds(costs_s, trial.rules) if pace is None else pace.rounds
    path = results_path(options, trial.experiment, trial.full_name)
    with Journal(path) as journal:
        run = begin(trial, rounds, options, screen, journal)
        if not run.is_complete:
            Recording(trial, run, journal, costs_s, screen).attempt_all()
    finished = next(r for r in reversed(read_runs(path)[0]) if r.run_id == run.run_id)
    if not finished.is_complete:
        raise VoidError(
            "two A/A misses: this machine is too busy or too unsteady to compare anything on it "
            "now; the run is recorded as void",
            finished,
        )
    return finished


def warm_up_groups(trial: Trial, screen: Screen) -> dict[str, float]:
    """Seconds that one round of each group costs, every arm warmed up by rule."""
    costs_s = {}
    with screen.progress("warming up", float(len(trial.groups))) as advance:
        for name, cost_s in warm_up(trial.groups, trial.rules, trial.synchronize):
            costs_s[name] = cost_s
            advance(1.0)
    return costs_s


def begin(
    trial: Trial,
    rounds: Mapping[str, Rounds],
    options: Options,
    screen: Screen,
    journal: Journal,
) -> Run:
    """A new run with its header written, or with `--resume` the last one of the file if equal."""
    fingerprint = machine.fingerprint()
    identity = {
        "schema": SCHEMA,
        "experiment": trial.experiment,
        "name": trial.full_name,
        "machine_id": machine.machine_id(fingerprint),
        **trial.identity,
    }
    setup = {
        "machine": fingerprint,
        "quick": options.quick,
        "rules": asdict(trial.rules),
        "arms": {group.name: list(group.arms) for group in trial.groups},
        **trial.setup,
    }
    if options.resume and (
        run := resumable_run(journal.path, {**identity, "setup": setup}, screen)
    ):
        return run
    started = timestamp()
    seed = secrets.randbits(32) if options.seed is None else options.seed
    header = {
        "kind": "run",
        **identity,
        "run": f"{started}-{secrets.token_hex(3)}",
        "started": started,
        "seeds": [seed, seed + 1],
        "setup": setup,
        "rounds": {name: asdict(value) for name, value in rounds.items()},
        **trial.header,
    }
    journal.append([header])
    return Run(header=header, records=())


def resumable_run(path: Path, wanted: Record, screen: Screen) -> Run | None:
    """The last run of the file, if it measured just this and was not voided; else says why not."""
    runs, skipped = read_runs(path)
    for line in skipped:
        screen.say(line)
    if not runs or (runs[-1].end and not runs[-1].is_complete):
        screen.say("Nothing to continue: starting a new run.")
        return None
    last = runs[-1]
    if different := differing_keys(json.loads(json.dumps(wanted)), last.header):
        screen.say(f"The last run differs in {', '.join(different)}: starting a new one.")
        return None
    state = "is complete" if last.is_complete else "continues"
    screen.say(f"Run {last.run_id} {state}: {len(last.records)} records are there.")
    return last


def differing_keys(wanted: Record, found: Record) -> list[str]:
    """Keys of `wanted` whose values differ in `found`; of nested objects, the keys inside."""
    different = []
    for key, value in wanted.items():
        other = found.get(key)
        if isinstance(value, dict) and isinstance(other, dict):
            different += differing_keys(value, other)
        elif value != other:
            different.append(key)
    return different


class Recording:
    """Measures one run and writes what it measures, from wherever the run stopped before."""

    def __init__(
        self,
        trial: Trial,
        run: Run,
        journal: Journal,
        costs_s: Mapping[str, float],
        screen: Screen,
    ) -> None:
        self.trial, self.run, self.screen = trial, run, screen
        self._journal, self._costs_s = journal, costs_s
        self._rounds = {name: Rounds(**value) for name, value in run.header["rounds"].items()}
        names = ("schema", "experiment", "name", "machine_id", "run", *trial.identity)
        self._identity = {name: run.header[name] for name in names}

    def attempt_all(self) -> None:
        """Each attempt with its own seed, until one passes or none is left."""
        seeds = self.run.header["seeds"]
        for attempt, seed in enumerate(seeds):
            if attempt < len(self.run.checks):
                continue  # made before an interruption, and missed
            aa = self.trial.aa
            check = aa_check(self.attempt(attempt, seed), aa.arm, aa.same_arm, aa.part)
            self.conclude(attempt, seed, check, is_last=attempt == len(seeds) - 1)
            if not check.is_miss:
                return

    def attempt(self, attempt: int, seed: int) -> list[Sample]:
        """All samples of one attempt, those recorded before an interruption included."""
        trial, done = self.trial, self.done(attempt)
        samples = [s for s in self.run.samples(attempt) if (s.round, s.group) in done]
        total_s = sum(self._costs_s[g.name] * self._rounds[g.name].total for g in trial.groups)
        with self.screen.progress(f"measuring, about {total_s:.0f} s", total_s) as advance:
            for _, name in done:
                advance(self._costs_s[name])
            for fresh in run_rounds(
                trial.groups, self._rounds, seed=seed, synchronize=trial.synchronize, done=done
            ):
                self._journal.append(sample_record(s, self._identity, attempt) for s in fresh)
                samples += fresh
                advance(self._costs_s[fresh[0].group])
        return samples

    def done(self, attempt: int) -> set[tuple[int, str]]:
        """(round, group) pairs that were measured with all their arms."""
        arms: dict[tuple[int, str], set[str]] = {}
        for sample in self.run.samples(attempt):
            arms.setdefault((sample.round, sample.group), set()).add(sample.arm)
        wanted = {group.name: set(group.arms) for group in self.trial.groups}
        return {key for key, names in arms.items() if names == wanted[key[1]]}

    def conclude(self, attempt: int, seed: int, check: AACheck, *, is_last: bool) -> None:
        """Record the A/A check and, where nothing follows, the end of the run with it."""
        values = {"attempt": attempt, "seed": seed, **aa_values(check)}
        records: list[Record] = [{"kind": "aa", **self._identity, **values}]
        if is_last or not check.is_miss:
            status = "void" if check.is_miss else "complete"
            end = {"status": status, "ended": timestamp()}
            records.append({"kind": "end", **self._identity, **end})
        self._journal.append(records)
        if check.is_miss:
            self.screen.say(
                f"A/A miss: two equal arms differ by {check.median - 1:+.1%}. It is recorded"
                + ("." if is_last else "; everything is measured once more with a new seed.")
            )


def timestamp() -> str:
    """UTC, to the second."""
    return datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
