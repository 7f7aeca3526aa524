"""Replay groups: honest samplers had the weights of the head that they name in their engines.

The luck of a slot is fixed by its head, so whoever has that head's weights draws these tokens, and
nobody else does. Weights are built from the blobs in some node's store, and have the head's root.
It needs torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import closing
from typing import Final

from echo_node.engine.base import Engine
from echo_node.engine.engine_classes import EngineSpec, make_engine
from echo_node.models import embedded
from echo_node.runs.run import Run
from echo_node.verifier.replay_check import ReplayCheck
from echo_node.weights.tensors import root_of
from protocol import Envelope, Opened, ProtocolError, TrajectoryGroup
from tests.chaos.branches import Branches
from tests.chaos.evidence import Evidence
from tests.chaos.report import Counts, Finding, short
from tests.records import record_of

MOST: Final = 96
"""Groups that are drawn again, shared out among samplers."""
ROWS: Final = 16


def drawn_at_the_named_head(evidence: Evidence, branches: Branches, counts: Counts) -> Iterator[Finding]:
    """Kept groups of honest samplers come out again from the weights of the head that they name.

    Bytes are kept of what waits, of batches since the last checkpoint, and of what an outbox may
    have to send again: the newest of a run. Of these as many as `MOST`; those whose head nobody can
    build any more are counted.
    """
    kept = _kept(evidence)
    engine = make_engine(EngineSpec("torch/f32", embedded.folder(), "cpu", ROWS, 1))
    with closing(engine), closing(Run.open(evidence.manifest.sealed, embedded.folder(), jailed=False)) as run:

        def at(head: bytes) -> Engine:
            if engine.loaded != head:
                raise LookupError
            return engine

        judge = ReplayCheck(run, at)
        for head, groups in itertools.groupby(kept, key=lambda group: group.message.heads[0]):
            if head not in branches.heads or not _load(evidence, branches, head, engine):
                counts["groups whose weights nobody can build"] += sum(1 for _ in groups)
                continue
            for group in groups:
                prompt, _ = run.prompt(run.slot_key(head, group.signer, group.message.slot))
                try:
                    found = judge.check(record_of(group, branches.heads[head].message.step, prompt))
                except LookupError:
                    counts["groups of several heads, not drawn again"] += 1
                    continue
                counts["groups drawn again"] += 1
                if found is not None and found.breach is not None and found.breach.sure:
                    text = f"group {short(group.id)} does not come from {branches.heads[head]}: {found.breach.what}"
                    yield Finding("held", evidence.name_of(group.signer), text)


def _kept(evidence: Evidence) -> list[Opened[TrajectoryGroup]]:
    """Sorted by head; of each sampler as many as of any other, the newest first."""
    found: dict[bytes, dict[bytes, bytes]] = {}
    for node in evidence.nodes:
        sealed = [group.sealed for group in (node.trainer.groups if node.trainer else {}).values()]
        for data in (*sealed, *(each.data for each in node.outbox)):
            envelope = Envelope.parse(data) if data else None
            if envelope is not None and envelope.kind == TrajectoryGroup.KIND:
                found.setdefault(envelope.signer, {})[envelope.id] = envelope.sealed
    honest = {node.key for node in evidence.nodes if node.honest}
    chosen = []
    shares = [list(groups.values())[::-1] for key, groups in sorted(found.items()) if key in honest]
    for sealed in itertools.islice(_in_turn(shares), MOST):
        try:
            chosen.append(Envelope.parse(sealed).open(TrajectoryGroup, evidence.manifest.id))
        except ProtocolError:
            continue  # its signature is another invariant's business
    return sorted(chosen, key=lambda group: (group.message.heads[0], group.id))


def _in_turn(shares: list[list[bytes]]) -> Iterator[bytes]:
    for row in itertools.zip_longest(*shares):
        yield from (each for each in row if each is not None)


def _load(evidence: Evidence, branches: Branches, head: bytes, engine: Engine) -> bool:
    for node in evidence.nodes:
        state = node.holdings.state(head) if node.holdings else None
        if state is not None and root_of(state) == branches.heads[head].message.root:
            engine.load(head, state)
            return True
    return False
