"""Targets of files and texts of strangers: models, tokenizers, manifests, links, seeds, backups.

What a run brings is its author's; a person has agreed to the author before it is opened, and it is
read with care all the same.
"""

from __future__ import annotations

import io
import shutil
import sqlite3
import tempfile
import zipfile
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final

from echo_node.contract.data_rows import read_rows
from echo_node.contract.jail.chat_template import ChatTemplate
from echo_node.contract.wheel_reader import read_wheel, record_entry
from echo_node.engine.base import TensorBytes
from echo_node.engine.gguf_map import read_plan
from echo_node.errors import ContractError, boundary
from echo_node.identity.key_backup import Cost, peer_of, write_backup
from echo_node.identity.keyfile import load as load_key
from echo_node.models import embedded
from echo_node.models.folder import check_folder, map_folder
from echo_node.net.discovery.address_book import AddressBook
from echo_node.net.discovery.seeds import parse_seed
from echo_node.runs.run import Run
from echo_node.runs.spec import read_run_file
from echo_node.runs.tokenizer import Tokenizer
from echo_node.weights.flat_layout import FlatLayout
from echo_node.weights.tensors import from_mapped, layout_of
from protocol import Layout, Manifest, blob_id, canonical, decode, encode, limits, open_manifest
from protocol.digest import ZERO
from protocol.envelope import sign_body
from protocol.manifest import Wheel
from protocol.weights import TensorEntry
from tests.fuzz.stage import STRANGER, run
from tests.fuzz.target import Feed, Opener, Target, plain
from tests.weights.anchor_bytes import write_safetensors

MESSAGES: Final = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 2 + 2?"}]
TEMPLATE: Final = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
RUN_FILE: Final = """name = "mine"
model = "embedded"
contract = "digits-reverse"

[sampling]
group_size = 4
"""


def _in_folder(name: str, read: Callable[[Path], object], *copied: str) -> Opener:
    """Read each input as a file of that name, beside the embedded model's other files."""

    @contextmanager
    def opened() -> Generator[Feed]:
        with tempfile.TemporaryDirectory(prefix="echo-fuzz-") as made:
            folder = Path(made)
            for each in copied:
                shutil.copyfile(embedded.folder() / each, folder / each)

            def feed(data: bytes) -> object:
                (folder / name).write_bytes(data)
                return read(folder)

            yield feed

    return opened


def _embedded(name: str) -> list[bytes]:
    return [(embedded.folder() / name).read_bytes()]


def _model_config(folder: Path) -> None:
    check_folder(folder)
    read_plan(folder)


def _tokenizer(folder: Path) -> None:
    words = Tokenizer.from_folder(folder)
    words.decode(words.encode("r48213="))


def _template(data: bytes) -> None:
    known = {"eos_token": "$", "messages": MESSAGES, "add_generation_prompt": True}
    ChatTemplate(data.decode("utf-8", "replace")).render(known)


def _weights() -> list[bytes]:
    small = {
        "a.scale": TensorBytes("f32", (), bytes(4)),
        "b.weight": TensorBytes("bf16", (3, 5), bytes(30)),
        "c.bias": TensorBytes("f16", (2, 2), bytes(8)),
    }
    return [write_safetensors(small)]


def _model_state(folder: Path) -> None:
    layout_of(from_mapped(map_folder(folder)))


def _layout(data: bytes) -> None:
    flat = FlatLayout(decode(Layout, data))
    assert len(flat.chunks) <= limits.CHUNKS
    flat.anchor_size  # noqa: B018 -- it is computed


def _layouts() -> list[bytes]:
    entries = (
        TensorEntry("a.weight", "bf16", (16, 64)),
        TensorEntry("b.bias", "f32", ()),
        TensorEntry("c.weight", "f16", (9,)),
    )
    return [encode(Layout(tensors=entries)), encode(Layout(tensors=entries[:1]))]


def _manifest(data: bytes) -> None:
    """Whatever it says, its author has signed it."""
    body = data[: limits.MANIFEST_BYTES]
    signature = sign_body(Manifest.KIND, body, STRANGER, ZERO)
    sealed = canonical.pack([limits.MAJOR, Manifest.KIND, ZERO, STRANGER.public, body, signature])
    open_manifest(sealed)
    with closing(Run.open(sealed, embedded.folder(), jailed=False)) as opened:
        opened.prompt(bytes(32))


def _book(folder: Path) -> None:
    for tail in ("-wal", "-shm", ".broken"):
        (folder / f"peers{tail}").unlink(missing_ok=True)
    with closing(AddressBook(folder / "peers")) as book:
        book.best(8)
        book.reached(STRANGER.public, "/ip4/192.0.2.1/tcp/4001")


def _books() -> list[bytes]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "peers"
        with closing(AddressBook(path)) as book:
            book.reached(STRANGER.public, "/ip4/192.0.2.1/tcp/4001")
            book.signed(STRANGER.public, ["/ip4/192.0.2.2/tcp/4001"])
        with closing(sqlite3.connect(path)) as file:
            file.execute("PRAGMA journal_mode = DELETE")
            file.execute("VACUUM")
        return [path.read_bytes(), b""]


def _key(folder: Path) -> None:
    (folder / "key").chmod(0o600)
    load_key(folder / "key")


def _checkpoint(data: bytes) -> None:
    from echo_node.errors import PeerError
    from echo_node.trainer.checkpoint import from_bytes

    from_bytes(data, blame=PeerError)


def _checkpoints() -> list[bytes]:
    import torch

    from echo_node.trainer.checkpoint import Checkpoint, to_bytes

    return [to_bytes(Checkpoint(3, {"w": torch.zeros(2, 3), "m": torch.ones(4)}, {"what": "a note"}))]


_SEEDS: Final = [
    f"/ip4/192.0.2.1/tcp/4001/p2p/{STRANGER.peer_id}",
    f"/dns4/seed.example/tcp/4001/p2p/{STRANGER.peer_id}",
    f"/ip6/2001:db8::1/tcp/4001/p2p/{STRANGER.peer_id}/p2p-circuit/p2p/{STRANGER.peer_id}",
    "/dnsaddr/seed.example",
]


def _wheel(data: bytes) -> None:
    read_wheel(data, Wheel(blob=blob_id(data), name="some-task", size=max(1, len(data)), version="1.0"))


def _wheels() -> list[bytes]:
    facts = "some_task-1.0.dist-info"
    files = {
        "some_task/__init__.py": b"",
        f"{facts}/METADATA": b"Name: some-task\nVersion: 1.0\nRequires-Dist: echo-node\n",
        f"{facts}/WHEEL": b"Root-Is-Purelib: true\nTag: py3-none-any\n",
    }
    rows = [",".join((path, *record_entry(data))) for path, data in files.items()]
    files[f"{facts}/RECORD"] = "\n".join([*rows, f"{facts}/RECORD,,", ""]).encode()
    made = []
    for method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w", method) as archive:
            for path, data in files.items():
                archive.writestr(zipfile.ZipInfo(path), data, method)
        made.append(packed.getvalue())
    return made


def _rows(folder: Path) -> None:
    rows = read_rows(folder / "data.jsonl", 2, 1, "train")
    with boundary(ContractError, "reading a row"):
        list(rows)


TARGETS: Final = [
    Target(
        name="wheel",
        entry="echo_node.contract.wheel_reader.read_wheel",
        opener=plain(_wheel),
        seeds=_wheels,
    ),
    Target(
        name="data-rows",
        entry="echo_node.contract.data_rows.read_rows",
        opener=_in_folder("data.jsonl", _rows),
        seeds=lambda: [b'{"answer": "4", "problem": "2+2"}\n{"answer": "6", "problem": "3+3"}\n'],
    ),
    Target(
        name="tokenizer-file",
        entry="echo_node.runs.tokenizer.Tokenizer.from_folder",
        opener=_in_folder("tokenizer.json", _tokenizer),
        seeds=lambda: _embedded("tokenizer.json"),
        most=8_192,
    ),
    Target(
        name="chat-template",
        entry="echo_node.contract.jail.chat_template.ChatTemplate.render",
        opener=plain(_template),
        seeds=lambda: [TEMPLATE.encode(), b"{{ messages | tojson }}", b"{% set x = 3 * 4 %}{{ x }}"],
        most=512,
    ),
    Target(
        name="model-config",
        entry="echo_node.engine.gguf_map.read_plan",
        opener=_in_folder("config.json", _model_config, "model.safetensors"),
        seeds=lambda: _embedded("config.json"),
    ),
    Target(
        name="model-weights",
        entry="echo_node.models.folder.check_folder",
        opener=_in_folder("model.safetensors", check_folder, "config.json"),
        seeds=_weights,
    ),
    Target(
        name="anchor",
        entry="echo_node.weights.tensors.from_mapped",
        opener=_in_folder("model.safetensors", _model_state, "config.json"),
        seeds=_weights,
    ),
    Target(
        name="layout", entry="echo_node.weights.flat_layout.FlatLayout", opener=plain(_layout), seeds=_layouts
    ),
    Target(
        name="checkpoint",
        entry="echo_node.trainer.checkpoint.from_bytes",
        opener=plain(_checkpoint),
        seeds=_checkpoints,
    ),
    Target(
        name="manifest",
        entry="echo_node.runs.run.Run.open",
        opener=plain(_manifest),
        seeds=lambda: [encode(run().manifest)],
        most=8_192,
    ),
    Target(
        name="run-file",
        entry="echo_node.runs.spec.read_run_file",
        opener=_in_folder("run.toml", lambda folder: read_run_file(folder / "run.toml")),
        seeds=lambda: [RUN_FILE.encode()],
        takes=False,
    ),
    Target(
        name="seed-text",
        entry="echo_node.net.discovery.seeds.parse_seed",
        opener=plain(lambda data: parse_seed(data.decode("utf-8", "replace"))),
        seeds=lambda: [each.encode() for each in _SEEDS],
        most=512,
    ),
    Target(
        name="backup-text",
        entry="echo_node.identity.key_backup.peer_of",
        opener=plain(lambda data: peer_of(data.decode("utf-8", "replace"))),
        seeds=lambda: [write_backup(STRANGER, "a long passphrase", Cost(doublings=14)).encode()],
        most=2_048,
    ),
    Target(
        name="peer-book",
        entry="echo_node.net.discovery.address_book.AddressBook",
        opener=_in_folder("peers", _book),
        seeds=_books,
        most=16_384,
    ),
    Target(
        name="key-file",
        entry="echo_node.identity.keyfile.load",
        opener=_in_folder("key", _key),
        seeds=lambda: [bytes(32), bytes(33)],
        most=128,
    ),
]
