"""Seeds: bootstrap addresses of the user or a manifest, resolved by DNS.

    /ip4/192.0.2.1/tcp/4001/p2p/ID       a number; /ip6 too
    /dns4/seed.example/tcp/4001/p2p/ID   a name; /dns6 for IPv6, /dns for both
    /dnsaddr/seed.example                a name whose TXT records hold further seeds;
                                         with /p2p/ID only that peer's

A name that does not resolve now may do so later: `resolve` raises `SeedError`, and the caller tries
again.
"""

from __future__ import annotations

import logging
import re
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import dns.asyncresolver
import dns.exception
import dns.resolver
import trio

from echo_node.errors import ConfigError, PeerError, one_line
from echo_node.net.discovery.address_scope import Scope, of_socket, scope
from protocol import ProtocolError, limits, public_key_of

RESOLVE_SECONDS: Final = 10.0
ANSWERS: Final = 32
"""Most seeds that one name may resolve to."""
NESTED: Final = 3
"""Most levels of `/dnsaddr` names within names."""
_FORM: Final = "/ip4/192.0.2.1/tcp/4001/p2p/12D3KooW…, /dns4/seed.example/tcp/4001/p2p/12D3KooW… or /dnsaddr/seed.example"
_LABEL: Final = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")
_SEED: Final = re.compile(
    r"(?P<where>/(?P<kind>ip4|ip6|dns4|dns6|dns)/(?P<host>[^/]+)/tcp/(?P<port>\d{1,5})(?P<relay>/p2p/\w{52}/p2p-circuit)?)"
    r"/p2p/(?P<peer>\w+)"
)
_LIST: Final = re.compile(r"/dnsaddr/(?P<host>[^/]+)(/p2p/(?P<peer>\w+))?")
_FAMILIES: Final = {"dns4": socket.AF_INET, "dns6": socket.AF_INET6, "dns": socket.AF_UNSPEC}
_log = logging.getLogger("echo_node.net.discovery.seeds")


class SeedError(PeerError):
    """A seed that cannot be resolved now."""


@dataclass(frozen=True, slots=True)
class Seed:
    """One bootstrap address. `public` is None where DNS records name the peer."""

    text: str
    kind: str
    host: str
    port: int = 0
    relay: str = ""
    public: bytes | None = None

    @property
    def where(self) -> str:
        """Its address without the peer, a name included."""
        return f"/{self.kind}/{self.host}/tcp/{self.port}{self.relay}"

    @property
    def is_named(self) -> bool:
        """Return whether it must be resolved by DNS, today and perhaps again tomorrow."""
        return self.kind not in {"ip4", "ip6"}


@dataclass(frozen=True, slots=True)
class ResolvedSeed:
    """A peer and its addresses."""

    public: bytes
    addresses: tuple[str, ...]


def parse_seed(text: str) -> Seed:
    """Parse a seed address."""
    text = text.strip()
    shown = one_line(text)[:120]
    match = _SEED.fullmatch(text) or _LIST.fullmatch(text)
    if match is None or len(text) > limits.ADDRESS_BYTES:
        missing = "/dns" not in text and "/p2p/" not in text
        raise ConfigError(
            f"the seed {shown!r} cannot be read",
            advice=("the peer id is missing: " if missing else "") + f"write it like {_FORM}",
        )
    found = match.groupdict()
    try:
        public = public_key_of(found["peer"]) if found["peer"] else None
    except ProtocolError as error:
        raise ConfigError(
            f"the seed {shown!r} names no peer: {error}", advice="copy the peer id (12D3KooW…) again"
        ) from None
    seed = Seed(
        text,
        found.get("kind") or "dnsaddr",
        found["host"],
        int(found.get("port") or 0),
        found.get("relay") or "",
        public,
    )
    if not seed.is_named and scope(found["where"]) is Scope.NOWHERE:
        raise ConfigError(
            f"the seed {shown!r} has an address that cannot be dialled", advice=f"write it like {_FORM}"
        )
    if seed.is_named and not all(map(_LABEL.fullmatch, seed.host.removesuffix(".").split("."))):
        raise ConfigError(
            f"the seed {shown!r} has a name that no host can have", advice=f"write it like {_FORM}"
        )
    if seed.kind != "dnsaddr" and not 0 < seed.port < 65_536:
        raise ConfigError(
            f"the seed {shown!r} has a port that there is not", advice="ports go from 1 to 65535"
        )
    return seed


def parse_seeds(texts: Iterable[str]) -> list[Seed]:
    """Parse the user's seeds, each once; the first malformed one is an error."""
    return list({seed.text: seed for seed in map(parse_seed, texts)}.values())


def parse_valid_seeds(texts: Iterable[str]) -> list[Seed]:
    """Parse seeds from a manifest or a link; malformed ones are logged and left out."""
    found: dict[str, Seed] = {}
    for text in texts:
        try:
            seed = parse_seed(text)
        except ConfigError as error:
            _log.warning("%s; it is left out", error)
        else:
            found[seed.text] = seed
    return list(found.values())


async def resolve(seed: Seed, *, resolver: dns.asyncresolver.Resolver | None = None) -> list[ResolvedSeed]:
    """Resolve a seed to peers and addresses, or raise a `SeedError` that says why not."""
    try:
        with trio.fail_after(RESOLVE_SECONDS):
            places = await _resolve(seed, resolver, NESTED)
    except trio.TooSlowError:
        raise SeedError(f"the name {seed.host} was not resolved within {RESOLVE_SECONDS:g} s") from None
    merged: dict[bytes, dict[str, None]] = {}
    for place in places:
        merged.setdefault(place.public, {}).update(dict.fromkeys(place.addresses))
    return [ResolvedSeed(public, tuple(found)[: limits.ADDRESSES]) for public, found in merged.items()]


async def _resolve(seed: Seed, resolver: dns.asyncresolver.Resolver | None, depth: int) -> list[ResolvedSeed]:
    if seed.kind == "dnsaddr":
        return await _resolve_list(seed, resolver, depth)
    if seed.public is None:
        raise SeedError(f"the seed {seed.text} names no peer")
    ips = [seed.host] if not seed.is_named else await numbers_of(seed.host, seed.port, seed.kind)
    return [ResolvedSeed(seed.public, tuple(of_socket(ip, seed.port) + seed.relay for ip in ips))]


async def numbers_of(host: str, port: int, kind: str) -> list[str]:
    """Resolve a name of `/dns`, `/dns4` or `/dns6` to dialable IP addresses.

    The system's resolver works in a thread that is abandoned at the deadline.
    """
    try:
        found = await trio.socket.getaddrinfo(host, port, _FAMILIES[kind], socket.SOCK_STREAM)
    except OSError as error:  # socket.gaierror is one
        raise SeedError(f"the name {host} cannot be resolved: {error.strerror or error}") from None
    except UnicodeError:
        raise SeedError(f"the name {host} cannot be resolved: it is no host name") from None
    ips = dict.fromkeys(str(sockaddr[0]) for *_, sockaddr in found)
    usable = [ip for ip in ips if scope(of_socket(ip, port)) > Scope.NOWHERE][:ANSWERS]
    if not usable:
        raise SeedError(f"the name {host} has no address that could be dialled")
    return usable


async def _resolve_list(
    seed: Seed, resolver: dns.asyncresolver.Resolver | None, depth: int
) -> list[ResolvedSeed]:
    if depth == 0:
        raise SeedError(f"the name {seed.host} leads from name to name to name")
    places: list[ResolvedSeed] = []
    problems: list[str] = []

    async def follow(inner: Seed) -> None:
        try:
            places.extend(await _resolve(inner, resolver, depth - 1))
        except SeedError as error:
            problems.append(error.what)

    texts = await _records(seed.host, resolver)  # before the nursery, which would wrap its error
    async with trio.open_nursery() as nursery:
        for text in texts:
            try:
                inner = parse_seed(text)
            except ConfigError as error:
                problems.append(error.what)
                continue
            if seed.public is None or inner.public is None or inner.public == seed.public:
                nursery.start_soon(follow, inner)
    wanted = [place for place in places if seed.public is None or place.public == seed.public]
    if not wanted:
        raise SeedError(
            f"the records of {seed.host} lead to no peer{': ' if problems else ''}{'; '.join(problems[:3])}"
        )
    return wanted[:ANSWERS]


async def _records(host: str, resolver: dns.asyncresolver.Resolver | None) -> list[str]:
    """Return the `dnsaddr=` TXT records of a name."""
    try:
        resolver = resolver or dns.asyncresolver.Resolver()
        answer = await resolver.resolve(f"_dnsaddr.{host}", "TXT", lifetime=RESOLVE_SECONDS, search=False)
    except (dns.exception.DNSException, OSError) as error:
        raise SeedError(f"the records of {host} cannot be had: {one_line(str(error))[:200]}") from None
    texts = (b"".join(record.strings).decode(errors="replace") for record in answer)
    return [text.removeprefix("dnsaddr=") for text in texts if text.startswith("dnsaddr=")][:ANSWERS]
