"""Evaluate versions on held-out prompts beside the steps, and keep the best one.

The leading trainer measures by its own engine, in a process of its own: what a peer says of a
version decides nothing. Steps go on meanwhile. The version that is measured and the best one so
far are pinned in the store, so that neither is pruned. At most one version waits: a newer one
takes its place.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import trio

from echo_node.engine.base import Engine, EngineStoppedError
from echo_node.errors import ContractError, EngineError, StoreError
from echo_node.runs.evaluation import HeldOutPrompt, evaluate, held_out_prompts
from echo_node.runs.evaluation_settings import EvaluationTable
from echo_node.runs.run import Run
from echo_node.runtime.change_signal import ChangeSignal
from echo_node.runtime.pause_gate import PauseGate
from echo_node.runtime.threads import run_stoppable
from echo_node.telemetry.evaluations import Evaluation, append_evaluation, best_of
from echo_node.telemetry.metrics import Records
from echo_node.weights.chain_log import Head
from echo_node.weights.store import WeightsStore

log = logging.getLogger(__name__)
MOST_SHOWN: Final = 200
"""Newest evaluations in the status."""


class Evaluator:
    """Evaluations of one trainer, kept in `folder` if there is one."""

    def __init__(
        self,
        run: Run,
        store: WeightsStore,
        engine: Engine,
        settings: EvaluationTable,
        records: Records,
        *,
        folder: Path | None = None,
        gate: PauseGate | None = None,
    ) -> None:
        self._run = run
        self._held_out: Run | None = None
        """The run with its held-out rows, opened with the first evaluation."""
        self._prompts: list[HeldOutPrompt] = []
        self._store = store
        self._engine = engine
        self._settings = settings
        self._records = records
        self._folder = folder
        self._gate = gate or PauseGate()
        self._changed = ChangeSignal()
        self._waiting: Head | None = None
        self._running: Head | None = None
        self._done = 0
        """Prompts that the running evaluation has scored."""
        self._last_step: int | None = None
        """Step of the newest version that was offered and taken."""
        self._passed_over = 0
        """Versions that were due while an earlier one was measured, and gave way to a newer one."""
        self._problem = ""
        """Why the last evaluation failed; empty if it did not."""
        self._best: Evaluation | None = None

    @property
    def best(self) -> Evaluation | None:
        """Return the evaluation of the best version on the chain so far."""
        return self._best

    def resume(self) -> None:
        """Pin the best version of earlier processes, and take up what they had to leave."""
        chain = self._store.follower.heads
        known = {head.id.hex() for head in chain}
        ours = [each for each in self._records.evaluations if each.head in known]
        self._keep_best(best_of(ours, self._decoding))
        self._last_step = max((each.step for each in ours if each.decoding == self._decoding), default=None)
        if not chain:
            return
        turn = chain[-1].message.step // self._settings.every
        due = (head for head in chain if head.message.step // self._settings.every == turn)
        can_build = self._store.archive.can_build
        self.offer(next((head for head in due if can_build(head.id)), chain[-1]))

    def offer(self, head: Head) -> None:
        """Take a published version, if an evaluation is due at its step."""
        step, every = head.message.step, self._settings.every
        if self._last_step is not None and step // every <= self._last_step // every:
            return
        self._last_step = step
        before, self._waiting = self._waiting, head
        self._store.pin(head.id)
        if before is not None:
            self._passed_over += 1
            self._unpin(before.id)
        self._changed.notify()

    async def work(self) -> None:
        """Evaluate what was offered until cancelled."""
        try:
            while True:
                since = self._changed.count
                if self._waiting is None:
                    await self._changed.wait(since)
                    continue
                await self._gate.wait_open()
                head, self._waiting = self._waiting, None
                self._running, self._done = head, 0
                try:
                    await self._measure(head)
                finally:
                    self._running = None
                    self._unpin(head.id)
                    self._changed.notify()
        finally:
            if self._held_out is not None and self._held_out is not self._run:
                with trio.CancelScope(shield=True):
                    await trio.to_thread.run_sync(self._held_out.close)

    async def finish(self) -> None:
        """Wait until everything that was offered is measured or given up."""
        while self._waiting is not None or self._running is not None:
            await self._changed.wait()

    def status(self) -> dict[str, Any]:
        """Return settings and results in plain values."""
        measured = [each for each in self._records.evaluations if each.decoding == self._decoding]
        last = measured[-1] if measured else None
        return {
            "every": self._settings.every,
            "prompts": self._settings.prompts,
            "temperature": self._settings.temperature,
            "running": self._running.message.version if self._running else None,
            "scored": self._done if self._running else None,
            "version": last.version if last else None,
            "step": last.step if last else None,
            "reward": round(last.reward, 4) if last else None,
            "error": round(last.error, 4) if last else None,
            "seconds": round(last.seconds, 1) if last else None,
            "best_version": self._best.version if self._best else None,
            "best_reward": round(self._best.reward, 4) if self._best else None,
            "passed_over": self._passed_over,
            "problem": self._problem,
            "curve": [[each.step, round(each.reward, 4)] for each in measured[-MOST_SHOWN:]],
        }

    @property
    def _decoding(self) -> tuple[float, int]:
        return self._settings.temperature or 0.0, self._settings.max_tokens or 0

    async def _measure(self, head: Head) -> None:
        """Evaluate one version; a failure is reported, and does not end the run."""
        began, settings = time.monotonic(), self._settings
        version = head.message.version

        def work(cancelled: Callable[[], bool]) -> Evaluation:
            if self._held_out is None:
                self._held_out = self._run.for_evaluation()
            if not self._prompts:
                self._prompts = held_out_prompts(self._held_out, settings.prompts)
            return evaluate(
                self._held_out,
                self._store,
                head,
                self._engine,
                self._prompts,
                temperature=settings.temperature,
                max_tokens=settings.max_tokens,
                stop=lambda: cancelled() or time.monotonic() - began > settings.seconds,
                on_progress=self._note,
            )

        try:
            found = await run_stoppable(work)
        except EngineStoppedError:
            self._problem = (
                f"version {version} was given up after {settings.seconds:g} s, at {self._done} of"
                f" {len(self._prompts)} prompts: raise evaluation.seconds, or lower evaluation.prompts"
            )
            log.warning("evaluation: %s", self._problem)
            return
        except (ContractError, EngineError, StoreError) as error:
            self._problem = f"version {version} could not be evaluated: {error}"
            log.warning("evaluation: %s", self._problem)
            return
        self._problem = ""
        found = dataclasses.replace(found, seconds=round(time.monotonic() - began, 3))
        if self._folder is not None:
            await trio.to_thread.run_sync(append_evaluation, self._folder, found)
        self._records.add_evaluation(found)
        if self._best is None or found.reward > self._best.reward:
            self._keep_best(found)

    def _note(self, done: int) -> None:
        self._done = done

    def _keep_best(self, found: Evaluation | None) -> None:
        """Pin the best version instead of the one before."""
        before, self._best = self._best, found
        if found is not None:
            self._store.pin(bytes.fromhex(found.head))
        if before is not None:
            self._unpin(bytes.fromhex(before.head))

    def _unpin(self, head_id: bytes) -> None:
        """Unpin a version, unless it is the best, or due, or being measured."""
        in_use = {each.id for each in (self._waiting, self._running) if each is not None}
        if self._best is not None:
            in_use.add(bytes.fromhex(self._best.head))
        if head_id not in in_use:
            self._store.unpin(head_id)
