"""Run one chaos test: `python -m tests.chaos --seed 7`.

The timeline goes to the terminal; the last line is the verdict, as JSON.

0 all invariants hold, 1 something was found, 2 it cannot be run here.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.chaos.harness import Wanted, run
from tests.chaos.nemesis import KINDS, faults, plan
from tests.chaos.swarm import SMALL, WHOLE
from tests.chaos.world import NoWorldError, own_mounts


def main() -> int:
    options = _read()
    parts = SMALL if options.small else WHOLE
    coming = plan(options.seed, parts, options.seconds, options.faults)
    if options.plan:
        _say("\n".join(map(str, coming)))
        return 0
    if options.soak:
        coming = faults(options.seed, parts, options.faults)
    else:
        _say(f"seed {options.seed}, {len(parts)} nodes, {len(coming)} faults in {options.seconds:g} s")
    place = options.place or Path(tempfile.mkdtemp(prefix="echo-chaos-")) / "run"
    try:
        own_mounts()
        found = run(
            Wanted(options.seed, parts, place.absolute(), coming, soak=options.soak, minutes=options.minutes),
            _say,
        )
    except NoWorldError as error:
        _say(f"chaos cannot be run here: {error}")
        return 2
    _sum_up(found, place)
    if options.place is None and not found["findings"]:
        shutil.rmtree(place.parent)
    _say(json.dumps(found))
    return 1 if found["findings"] else 0


def _read() -> argparse.Namespace:
    words = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    words.add_argument("--seed", type=int, default=1)
    words.add_argument("--seconds", type=float, default=60.0, help="for which the nemesis acts")
    words.add_argument("--small", action="store_true", help="six nodes instead of ten")
    words.add_argument("--place", type=Path, help="a new folder for all that is written down")
    words.add_argument("--faults", type=_kinds, default=KINDS, help=f"some of {','.join(KINDS)}")
    words.add_argument("--plan", action="store_true", help="print the plan and do nothing")
    words.add_argument("--soak", action="store_true", help="go on until Ctrl-C, and measure")
    words.add_argument("--minutes", type=float, help="so long, for --soak")
    return words.parse_args()


def _kinds(text: str) -> list[str]:
    """Kinds of faults; `hostile` is all of those."""
    wanted = [
        kind for word in text.split(",") for kind in KINDS if kind == word or kind.startswith(f"{word}_")
    ]
    unknown = [word for word in text.split(",") if not any(kind.startswith(word) for kind in KINDS)]
    if unknown or not wanted:
        raise argparse.ArgumentTypeError(f"no fault is called {', '.join(unknown) or 'that'}")
    return wanted


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _sum_up(found: dict[str, Any], place: Path) -> None:
    _say(f"faults: {', '.join(f'{count} {kind}' for kind, count in found['faults'].items())}")
    for node, slopes in found.get("slopes", {}).items():
        _say(f"slopes of {node}: {', '.join(f'{name} {value}' for name, value in slopes.items())}")
    for each in found["findings"]:
        _say(f"FOUND {each['invariant']} {each['node'] or '-'}: {each['text']}")
    _say(
        f"{len(found['findings'])} findings; everything is in {place}"
        if found["findings"]
        else "all invariants hold"
    )


if __name__ == "__main__":
    sys.exit(main())
