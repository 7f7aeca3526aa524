"""Check available engines and contracts, and the layers of the jail."""

from __future__ import annotations

from echo_node.contract import available
from echo_node.contract.jail.required import ADVICE_NO_LAYER, REQUIRED
from echo_node.contract.sandbox import layers
from echo_node.doctor.finding import Finding, lacking, well, wrong
from echo_node.engine.engine_classes import kinds
from echo_node.errors import EchoError


def look() -> list[Finding]:
    return [*_engines(), *_contracts(), *_jail()]


def _engines() -> list[Finding]:
    try:
        found = kinds()
    except EchoError as error:
        return [wrong("engines", "any", error.what, error.advice or "echo-node engines says more")]
    points = [
        well("engines", kind.engine_class, f"on {kind.device}")
        if kind.installed
        else lacking("engines", kind.engine_class, kind.why_not, kind.install)
        for kind in found
    ]
    if not any(kind.installed for kind in found):
        points.append(wrong("engines", "any", "a sampler needs one", found[0].install))
    return points


def _contracts() -> list[Finding]:
    return [
        well("contracts", f"{each.name} {each.version}".strip(), each.package or "built in")
        for each in available()
    ]


def _jail() -> list[Finding]:
    try:
        found = layers()
    except EchoError as error:
        fix = error.advice or "contracts of others do not run here: use a Linux with namespaces and seccomp"
        return [wrong("jail", "contracts", error.what, fix)]
    holds = {layer.name for layer in found if layer.active}
    return [
        *(
            well("jail", layer.name, "active")
            if layer.active
            else lacking("jail", layer.name, layer.why_not, _LOOSER)
            for layer in found
        ),
        *(
            wrong(
                "jail",
                wanted.replace("|", " or "),
                "contracts of runs do not run without it",
                ADVICE_NO_LAYER,
            )
            for wanted in REQUIRED
            if holds.isdisjoint(wanted.split("|"))
        ),
    ]


_LOOSER = "the other layers hold; a newer kernel, or a container that may make namespaces, adds this one"
