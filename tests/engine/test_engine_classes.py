"""Engines by name: which there are, which run here, which one to take."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from echo_node.engine import engine_classes
from echo_node.engine.base import SamplingLimits, SlotRequest, generate_groups
from echo_node.engine.engine_classes import CLASSES, EngineSpec, best_class, make_engine
from echo_node.errors import ConfigError, EngineError
from echo_node.models import embedded
from echo_node.runs.tokenizer import Tokenizer
from echo_node.weights.open_store import read_folder

LIMITS = SamplingLimits(max_tokens=6, temperature=0.1, end_tokens=frozenset({12}), vocab_size=16)


@pytest.fixture
def without(monkeypatch):
    """Make packages look as if they were not installed."""

    def hide(*packages):
        for package in packages:
            monkeypatch.setitem(sys.modules, package, None)

    return hide


@pytest.mark.parametrize("engine_class", CLASSES)
def test_every_class_makes_an_engine_of_its_name_that_generates(engine_class):
    engine = make_engine(EngineSpec(engine_class, embedded.folder(), device="cpu", rows=3, threads=1))
    try:
        about = engine.describe()
        assert (about.engine_class, about.rows, about.device) == (engine_class, 3, "cpu")
        engine.load(b"h" * 32, read_folder(embedded.folder()))
        prompt = Tokenizer.from_folder(embedded.folder()).encode("r48213=")
        (draws,) = generate_groups(engine, [SlotRequest(prompt.astype(np.int64), b"k" * 32, 4, LIMITS)])
        assert len(draws) == 4
        assert {draw.ids.size for draw in draws} == {6}, "five digits and the end"
    finally:
        engine.close()


def test_a_class_that_nobody_has_heard_of_is_refused_with_those_there_are():
    with pytest.raises(ConfigError, match="no engines of the class 'vllm/f16'") as caught:
        make_engine(EngineSpec("vllm/f16", embedded.folder()))
    assert "llama/f16, torch/f32" in caught.value.advice


@pytest.mark.parametrize(
    ("package", "engine_class", "extra"),
    [
        ("llama_cpp", "llama/f16", "llama"),
        ("gguf", "llama/f16", "llama"),
        ("transformers", "torch/f32", "torch"),
    ],
)
def test_an_engine_whose_packages_are_missing_says_what_to_install(without, package, engine_class, extra):
    without(package)
    with pytest.raises(EngineError, match=f"the engine {engine_class} needs {package}") as caught:
        make_engine(EngineSpec(engine_class, embedded.folder()))
    assert caught.value.advice == f'pip install "echo-node[{extra}]"'


def test_every_class_is_listed_with_what_it_lacks(without):
    assert [kind.engine_class for kind in engine_classes.kinds()] == list(CLASSES)
    assert all(kind.installed and not kind.why_not for kind in engine_classes.kinds())
    without("llama_cpp")
    found = {kind.engine_class: kind for kind in engine_classes.kinds()}
    assert found["torch/f32"].installed
    assert not found["llama/q8_0"].installed
    assert found["llama/q8_0"].why_not == "needs llama_cpp"
    assert found["llama/q8_0"].install == 'pip install "echo-node[llama]"'


def test_looking_around_imports_neither_torch_nor_llama():
    code = (
        "import sys; from echo_node.engine import engine_classes as kinds\n"
        "kinds.kinds(); kinds.best_class(kinds.CLASSES)\n"
        "print(*{'torch', 'transformers', 'llama_cpp', 'gguf'} & sys.modules.keys())"
    )
    if engine_classes._gpu_hardware():
        pytest.skip("with a GPU, torch and llama.cpp are asked about it")
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "\n"


@pytest.mark.parametrize(
    ("allowed", "best"),
    [
        (CLASSES, "llama/f16"),
        ({"torch/f32", "llama/q8_0"}, "torch/f32"),
        ({"torch/bf16", "llama/q8_0"}, "torch/bf16"),
        ({"llama/q8_0", "llama/q4_0", "vllm/f16"}, "llama/q8_0"),
    ],
)
def test_on_a_cpu_llama_in_f16_comes_first_and_few_bits_last(monkeypatch, allowed, best):
    monkeypatch.setattr(engine_classes, "torch_device", lambda: "cpu")
    assert best_class(allowed) == best


@pytest.mark.parametrize(
    ("wanted", "best", "device"),
    [("auto", "torch/f32", "cuda"), ("cuda", "torch/f32", "cuda"), ("cpu", "llama/f16", "cpu")],
)
def test_the_device_that_a_person_wants_decides_the_engine(monkeypatch, wanted, best, device):
    monkeypatch.setattr(engine_classes, "torch_device", lambda: "cuda")
    assert (best_class(CLASSES, wanted), engine_classes.device_of(best, wanted)) == (best, device)
    engine_classes.check_device(wanted)
    with pytest.raises(ConfigError, match="there is no mps here"):
        engine_classes.check_device("mps")


@pytest.mark.parametrize("device", ["cuda", "mps"])
def test_on_a_gpu_torch_comes_first(monkeypatch, device):
    monkeypatch.setattr(engine_classes, "torch_device", lambda: device)
    assert best_class(CLASSES) == "torch/f32"
    assert best_class({"llama/f16", "torch/bf16"}) == "torch/bf16"
    assert best_class({"llama/f16", "llama/q8_0"}) == "llama/f16"
    assert {kind.device for kind in engine_classes.kinds()} == {device, "cpu"}


@pytest.mark.parametrize("wanted", ["auto", "cuda"])
def test_a_gpu_that_only_llama_can_use_puts_llama_first(monkeypatch, wanted):
    monkeypatch.setattr(engine_classes, "torch_device", lambda: "cpu")
    monkeypatch.setattr(engine_classes, "llama_device", lambda: "cuda")
    assert best_class({"torch/f32", "llama/q4_0"}, wanted) == "llama/q4_0"
    assert engine_classes.device_of("llama/q4_0", wanted) == "cuda"
    assert engine_classes.device_of("torch/f32", wanted) == "cpu"
    engine_classes.check_device(wanted)
    if wanted == "cuda":
        with pytest.raises(ConfigError, match="there is no cuda here that torch can use"):
            engine_classes.check_device(wanted, torch_only=True)


def test_a_gpu_that_nothing_here_can_use_is_refused_with_the_next_step(monkeypatch):
    monkeypatch.setattr(engine_classes, "torch_device", lambda: "cpu")
    monkeypatch.setattr(engine_classes, "llama_device", lambda: "cpu")
    with pytest.raises(ConfigError, match=r"no cuda here that torch or llama\.cpp can use") as caught:
        engine_classes.check_device("cuda")
    assert "echo-node doctor" in caught.value.advice


@pytest.mark.parametrize("hardware", [False, True])
@pytest.mark.parametrize("offloads", [False, True])
def test_llama_computes_on_a_gpu_if_there_is_one_and_its_build_can(monkeypatch, hardware, offloads):
    monkeypatch.setattr(engine_classes, "_gpu_hardware", lambda: hardware)
    monkeypatch.setattr("llama_cpp.llama_supports_gpu_offload", lambda: offloads)
    assert engine_classes.llama_offloads() is offloads
    assert (engine_classes.llama_device() != "cpu") is (hardware and offloads)


def test_only_what_is_installed_is_chosen(without):
    without("llama_cpp")
    assert best_class({"llama/f16", "torch/f32"}) == "torch/f32"
    with pytest.raises(EngineError, match="llama/f16 needs llama_cpp"):
        best_class({"llama/f16"})
    without("torch")
    assert engine_classes.torch_device() == "cpu"
    with pytest.raises(EngineError, match="pip install"):
        best_class(CLASSES)


@pytest.mark.parametrize("allowed", [set(), {"vllm/f16"}])
def test_a_run_that_allows_nothing_we_have_is_said_so(allowed):
    with pytest.raises(ConfigError, match="this program has no engine of"):
        best_class(allowed)
